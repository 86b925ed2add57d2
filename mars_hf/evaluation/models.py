"""From what a user passes to a causal language model and a tokenizer."""

import copy
import os
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from mars_hf.hub import only_local


def prepare(model_or_path: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Loads or unwraps a model, and copies its tokenizer, onto which lm-eval writes a pad token.

    Args:
        model_or_path: A causal transformers model, wrapped by DistributedDataParallel or torch.compile or not; or a
            checkpoint folder or name on the Hub, loaded onto the GPU if there is one.
        tokenizer: The model's tokenizer; None only with a path.

    Returns:
        The bare model, the same object as was passed, and a copy of the tokenizer.

    Raises:
        ValueError: A model in memory without tokenizer, a path that holds no model or not all of its weights, a
            model that is not causal.
    """
    if isinstance(model_or_path, (str, os.PathLike)):
        path = os.fspath(model_or_path)
        model = _load(transformers.AutoModelForCausalLM, "model_or_path", "causal language model", path)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        if tokenizer is None:
            tokenizer = _load(transformers.AutoTokenizer, "tokenizer", "tokenizer", path)
    else:
        model = _unwrap(model_or_path)
    _check_causal(model)
    if tokenizer is None:
        raise ValueError("tokenizer: None, but a model in memory does not know its tokenizer; pass tokenizer=")
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} is no transformers tokenizer; "
            "wrap it, PreTrainedTokenizerFast(tokenizer_object=...)"
        )
    return model, copy.deepcopy(tokenizer)


def _load(kind: Any, argument: str, what: str, path: str) -> Any:
    # Without this, a name that is not there costs most of a minute in retries when the Hub is out of reach.
    local = only_local(path)
    weights = argument != "tokenizer"
    try:
        loaded = kind.from_pretrained(path, local_files_only=local, **{"output_loading_info": True} if weights else {})
        # A folder with a model only gives a tokenizer of the model's kind that knows no tokens but the special ones.
        if not weights and len(loaded) <= len(loaded.all_special_ids):
            raise OSError("a tokenizer without vocabulary")
    except (OSError, ValueError) as error:
        way_out = "pass a checkpoint folder or a name on the Hub" if weights else "pass tokenizer="
        if not os.path.isdir(path) and local:
            way_out += ", which is out of reach now"
        raise ValueError(f"{argument}: no {what} found at {path!r}; {way_out}") from error
    except (RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{argument}: {path!r} cannot be loaded ({reason}); save it again") from error
    if not weights:
        return loaded
    model, report = loaded
    # transformers fills them with random numbers and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{argument}: {path!r} lacks {len(missing)} weights, such as {missing[0]!r}; "
            "pass one saved by save_pretrained() of the bare model"
        )
    return model


def _unwrap(model: Any) -> Any:
    """The model within torch.compile (`_orig_mod`) and DistributedDataParallel (`module`), in any order."""
    while not isinstance(model, transformers.PreTrainedModel):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if inner is None:
            return model
        model = inner
    return model


def _check_causal(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "can_generate"):
        raise ValueError(f"model_or_path: {type(model).__name__} is no transformers model, wrapped model or path")
    if config.is_encoder_decoder or not model.can_generate():
        raise ValueError(
            f"model_or_path: {type(model).__name__} is no causal language model; "
            "pass one with a language-model head, such as AutoModelForCausalLM loads"
        )
