"""Checkpoints of nanoGPT and of the training scripts that grew out of it, the MARS authors' among them.

Such a `ckpt.pt` holds `model` (weights), `model_args` and `optimizer`. Names and shapes are those of GPT-2 in
`transformers`, but for the linear layers, which `transformers` stores transposed (`Conv1D`).
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from mars_hf.models.gpt2 import build_gpt2

# Of DistributedDataParallel and torch.compile, alone or both.
_PREFIXES = re.compile(r"^(?:module\.|_orig_mod\.)+")
# The causal mask, where attention is spelled out.
_MASK = re.compile(r"\.attn\.(?:bias|masked_bias)$")
_LINEAR = re.compile(r"\.(?:c_attn|c_proj|c_fc)\.weight$")
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def read_nanogpt(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint without running any code in it (`weights_only=True`).

    Args:
        path: the file.

    Returns:
        What was saved. Its tensors may lie in the file until they are used.

    Raises:
        ValueError: no such file, no checkpoint, one that only `pickle` can read, or one without weights or model_args.
    """
    if not Path(path).is_file():
        raise ValueError(f"checkpoint={str(path)!r} is not a file: give the ckpt.pt of a run")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"checkpoint={str(path)!r} holds {found[1] if found else 'more than tensors and numbers'}, which only an "
            "unsafe load can read: where you trust it, torch.load(..., weights_only=False), turn such values into "
            "numbers or strings, torch.save"
        ) from None
    except Exception as error:  # bytes of another kind of file can mean anything
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"checkpoint={str(path)!r} is no file of torch.save: {type(error).__name__} {reason}"
        ) from None
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    missing = {name for name in ("model", "model_args") if not isinstance(parts.get(name), dict)}
    if missing:
        raise ValueError(
            f"checkpoint={str(path)!r} has no {' and no '.join(sorted(missing))}: it is not one of a nanoGPT-style run"
        )
    return checkpoint


def nanogpt_weights(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters of a checkpoint as they are stored there, in the order of the model's `named_parameters()`.

    Prefixes of wrappers are dropped, and so are causal masks and an output head that equals the token embeddings.

    Args:
        checkpoint: from `read_nanogpt`.
    """
    weights = {_PREFIXES.sub("", name): t for name, t in checkpoint["model"].items() if isinstance(t, Tensor)}
    weights = {name: tensor for name, tensor in weights.items() if not _MASK.search(name)}
    if _HEAD in weights and _EMBEDDING in weights and torch.equal(weights[_HEAD], weights[_EMBEDDING]):
        del weights[_HEAD]
    return weights


def is_transposed(name: str) -> bool:
    """Whether `transformers` stores the parameter of this name transposed."""
    return bool(_LINEAR.search(name))


def model_from_nanogpt(checkpoint: dict[str, Any], *, activation_function: str | None = None) -> GPT2LMHeadModel:
    """GPT-2 of `transformers` with the weights of a checkpoint; its logits agree.

    Args:
        checkpoint: from `read_nanogpt`.
        activation_function: "gelu_pytorch_tanh" or "gelu" (exact). No checkpoint says which one its model had. None:
            tanh where model_args know `scale_attn_by_inverse_layer_idx` (the MARS authors' models), else exact
            (nanoGPT since June 2023; its older models and OpenAI's weights have tanh).

    Returns:
        The model on the CPU, in the dtype of the weights. Without biases in the checkpoint they are 0 and frozen, as in
        `build_gpt2`.

    Raises:
        ValueError: `model_args` lack something, or the weights are not those of the model they describe.
    """
    given, weights = checkpoint["model_args"], nanogpt_weights(checkpoint)
    missing = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"} - given.keys()
    if missing:
        raise ValueError(f"checkpoint: model_args have no {', '.join(sorted(missing))}, which a GPT-2 needs")
    by_layer = given.get("scale_attn_by_inverse_layer_idx")
    bias = "transformer.ln_f.bias" in weights
    end_of_text = 50256 if given["vocab_size"] > 50256 else None
    config = GPT2Config(
        **{name: given[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
        n_positions=given["block_size"],
        activation_function=activation_function or ("gelu" if by_layer is None else "gelu_pytorch_tanh"),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), given.get("dropout", 0.0)),
        scale_attn_by_inverse_layer_idx=bool(by_layer),
        tie_word_embeddings=_HEAD not in weights,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
    )
    with torch.device("meta"):
        model = build_gpt2(config, bias=bias)
    expected = dict(model.named_parameters())
    for name in [*expected, *weights]:
        optional = not bias and name.endswith(".bias") and name in expected
        if name not in weights and optional:
            continue
        stored = weights[name].T if name in weights and is_transposed(name) else weights.get(name)
        here, there = (tuple(t.shape) if t is not None else None for t in (stored, expected.get(name)))
        if here != there:
            raise ValueError(
                f"checkpoint: weight {name!r} has the shape {here}, a GPT-2 of its model_args {there} (None: it has no "
                "such weight): only GPT-2 as nanoGPT builds it can be imported"
            )
    dtype = weights[_EMBEDDING].dtype
    state = {
        name: weights[name].T.contiguous() if is_transposed(name) else weights[name]
        for name in expected
        if name in weights
    }
    zeros = {name: torch.zeros(p.shape, dtype=dtype) for name, p in expected.items() if name not in weights}
    model.load_state_dict({**state, **zeros}, strict=False, assign=True)
    model.tie_weights()
    return model
