"""GPT-2 as the authors of MARS train it, in the classes of `transformers`.

Sizes and settings are those of the paper (arXiv 2411.10438) and its code (github.com/AGI-Arena/MARS). A checkpoint is
an ordinary GPT-2 checkpoint: `AutoModelForCausalLM.from_pretrained` reads it, without this package.
"""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

# layers, heads, width
SIZES = {
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
    "xl": (48, 25, 1600),
}


def gpt2_config(size: str = "small", **overrides: Any) -> GPT2Config:
    """Configures one of the four models of the paper.

    Against OpenAI's GPT-2 these have no dropout, a vocabulary of 50,304 (50,257 padded to a multiple of 64, which is
    faster), and attention logits divided by the layer's number, counted from 1. The activation is GPT-2's `gelu_new`
    under its other name, `gelu_pytorch_tanh`: the same function, fused.

    Args:
        size: "small" (124M parameters), "medium" (355M), "large" (774M) or "xl" (1557M).
        **overrides: Fields of `GPT2Config` to set otherwise, such as `vocab_size=len(tokenizer)`, `n_positions`
            (tokens) or `n_layer`. `bos_token_id` and `eos_token_id` are GPT-2's 50,256 where the vocabulary has it,
            else None.

    Returns:
        The configuration, for `build_gpt2`.

    Raises:
        ValueError: Unknown size or field, a size below 1, or a width that the heads do not divide.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is unknown: choose one of {', '.join(SIZES)}")
    known = [field.name for field in fields(GPT2Config)]
    for name in overrides:
        if name not in known:
            nearest = GPT2Config.attribute_map.get(name) or get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ValueError(f"{name}={overrides[name]!r} is no field of GPT2Config: did you mean {nearest!r}?")

    n_layer, n_head, n_embd = SIZES[size]
    settings = {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_embd": n_embd,
        "vocab_size": 50304,
        "n_positions": 1024,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": True,
        **overrides,
    }
    for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions"):
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(f"{name}={settings[name]!r} must be a whole number, 1 or more")
    if settings["n_embd"] % settings["n_head"]:
        raise ValueError(
            f"n_embd={settings['n_embd']} is not a multiple of n_head={settings['n_head']}: all heads are of one width"
        )
    end_of_text = 50256 if settings["vocab_size"] > 50256 else None
    return GPT2Config(**{"bos_token_id": end_of_text, "eos_token_id": end_of_text, **settings})


def build_gpt2(config: GPT2Config, *, bias: bool = False) -> GPT2LMHeadModel:
    """Builds a GPT-2 with fresh weights, the same for the same torch seed.

    Weights are N(0, initializer_range), the two projections back into the residual stream N(0, initializer_range /
    sqrt(2 n_layer)), norms 1, biases 0: what `transformers` does by itself.

    Args:
        config: From `gpt2_config`, or any other.
        bias: Whether the biases of linear layers and norms train. The authors' models have none. The class always has
            them, so False leaves them at zero with `requires_grad=False`. No checkpoint records that: a model from
            `from_pretrained` trains its biases; load the weights into one from here to keep them frozen.

    Returns:
        The model, in float32 (or torch's default dtype) and in training mode.
    """
    model = GPT2LMHeadModel(config)
    model.train()
    # The loss it would take anyway, but with a warning about an unrecognised one.
    model.loss_type = "ForCausalLM"
    for name, parameter in model.named_parameters():
        if not bias and name.endswith(".bias"):
            parameter.requires_grad_(False)
    return model
