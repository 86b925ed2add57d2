"""Causal language models of any architecture of `transformers`, with fresh weights, from a configuration."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mars_hf.hub import only_local
from mars_hf.models.gpt2 import build_gpt2, gpt2_config

# Of the classes for causal language modelling in `transformers`, those whose loss compares every token with itself, so
# that a model learns to copy (as do the decoders of all encoder-decoder models), that see what they have to predict, or
# that count positions from the padding token on.
_NOT_NEXT_TOKEN = frozenset({"trocr", "xlm", "xlnet", "cpmant", "data2vec-text", "xmod"})
_NOT_NEXT_TOKEN |= {"roberta", "roberta-prelayernorm", "camembert", "xlm-roberta", "xlm-roberta-xl"}


def load_config(name: str, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Loads the configuration of a causal language model.

    Args:
        name: a config.json, a folder with one, or a model on the hub. Weights beside it are not read.
        overrides: fields to set otherwise, under the names of that configuration.

    Raises:
        ValueError: it cannot be loaded, is not of a causal language model of `transformers` that learns the next token,
            or has no such field.
    """
    if Path(name).suffix == ".json" and not Path(name).is_file():
        raise ValueError(f"model_config={name!r} is not a file: give a config.json, a folder with one or a hub name")
    try:
        local = Path(name).is_file() or only_local(name)
        settings, _ = PreTrainedConfig.get_config_dict(name, local_files_only=local)
    except (OSError, ValueError) as error:
        raise ValueError(f"model_config={name!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    kind = settings.pop("model_type", None)
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model_config={name!r} is of model_type {kind!r}, no causal language model of transformers")
    if kind in _NOT_NEXT_TOKEN or getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False):
        raise ValueError(
            f"model_config={name!r} is of model_type {kind!r}, which transformers does not train to predict the next "
            "token of a block: choose a decoder, such as gpt2 or llama"
        )
    known = CONFIG_MAPPING[kind]() if overrides else None
    for field in overrides or {}:
        if known is not None and not hasattr(known, field):
            near = get_close_matches(field, [*known.to_dict(), *known.attribute_map], n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"model_overrides: {field!r} is no field of {type(known).__name__}{hint}")
    try:
        config = CONFIG_MAPPING[kind](**{**settings, **(overrides or {})})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"model_config={name!r} with model_overrides: {' '.join(str(error).split())}") from None
    # Composite configurations wrap the one of the language model.
    config = config.get_text_config()
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # a BERT would otherwise see what it has to predict
    return config


def configure(
    vocabulary: PreTrainedTokenizerBase | int,
    block_size: int,
    *,
    model_size: str = "small",
    model_config: str | None = None,
    model_overrides: str | None = None,
    **sizes: int | None,
) -> PreTrainedConfig:
    """The configuration that the settings of a run describe, fitted to its data.

    Args:
        vocabulary: the tokenizer of the data, or its number of tokens, which leaves special tokens as they are.
        block_size: tokens of a training sequence.
        model_size: see `gpt2_config`.
        model_config: see `load_config`; `model_size` and `sizes` do not apply then.
        model_overrides: fields of the configuration to set otherwise, as JSON.
        **sizes: fields of `GPT2Config`; None leaves that of `model_size`.

    Raises:
        ValueError: see `gpt2_config`, `load_config` and `fit_to_data`.
    """
    try:
        overrides = json.loads(model_overrides or "{}")
    except json.JSONDecodeError:
        overrides = None
    if not isinstance(overrides, dict):
        raise ValueError(f'model_overrides={model_overrides!r} is no JSON object: write {{"field": value}}')
    if model_config is not None:
        config = load_config(model_config, overrides)
    else:
        chosen = {name: size for name, size in sizes.items() if size is not None}
        config = gpt2_config(model_size, **{**chosen, **overrides})
    return fit_to_data(config, vocabulary, block_size, vocab_size=overrides.get("vocab_size"))


def fit_to_data(
    config: PreTrainedConfig,
    vocabulary: PreTrainedTokenizerBase | int,
    block_size: int,
    *,
    vocab_size: int | None = None,
) -> PreTrainedConfig:
    """Sets what the data decides: vocabulary, positions and special tokens.

    The vocabulary is that of the tokenizer, or that of the configuration where it is larger by less than 1 %, which is
    padding (50,304 for GPT-2's 50,257). There are as many positions as a block has tokens, where the architecture
    counts them. A padding token that is eos as well is left out: the embedding of a padding token never trains.

    Args:
        config: modified in place.
        vocabulary: see `configure`.
        block_size: tokens of a training sequence.
        vocab_size: the vocabulary to have instead.

    Returns:
        `config`.

    Raises:
        ValueError: `vocab_size` is smaller than the tokenizer.
    """
    tokens = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    if vocab_size is not None and vocab_size < tokens:
        raise ValueError(f"vocab_size={vocab_size:,} of the model is too small: the tokenizer has {tokens:,} tokens")
    is_padding = tokens <= config.vocab_size < 1.01 * tokens
    config.vocab_size = vocab_size or (config.vocab_size if is_padding else tokens)
    for name in ("max_position_embeddings", "max_seq_len"):
        if hasattr(config, name):
            setattr(config, name, block_size)
    if not isinstance(vocabulary, int):
        config.bos_token_id, config.eos_token_id = vocabulary.bos_token_id, vocabulary.eos_token_id
        config.pad_token_id = vocabulary.pad_token_id if vocabulary.pad_token_id != vocabulary.eos_token_id else None
    return config


def build_model(config: PreTrainedConfig, *, bias: bool = False) -> PreTrainedModel:
    """Builds a causal language model with fresh weights, the same for the same torch seed.

    Args:
        config: from `load_config` or `gpt2_config`.
        bias: whether the biases of a GPT-2 train, see `build_gpt2`; other architectures have them or not.

    Returns:
        The model in torch's default dtype, whatever the configuration says (the weights of mixed precision are
        float32), and in training mode.
    """
    if isinstance(config, GPT2Config):
        return build_gpt2(config, bias=bias)
    return AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype()).train()
