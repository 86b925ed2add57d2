"""The authors' models: sizes, function, initial values, and an ordinary checkpoint."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config

from mars_hf.models import build_gpt2, gpt2_config

TINY = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 97, "n_positions": 16}


def parameters(model: torch.nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad is trained)


# By hand: vocabulary x width + positions x width + layers x (12 width^2 + 2 width) + width. Small:
# 50304 x 768 + 1024 x 768 + 12 x (7077888 + 1536) + 768 = 38633472 + 786432 + 84953088 + 768.
@pytest.mark.parametrize(
    ("size", "layers", "heads", "width", "count"),
    [
        ("small", 12, 12, 768, 124_373_760),
        ("medium", 24, 16, 1024, 354_599_936),
        ("large", 36, 20, 1280, 773_582_080),
        ("xl", 48, 25, 1600, 1_556_840_000),
    ],
)
def test_sizes(size, layers, heads, width, count):
    config = gpt2_config(size)
    assert (config.n_layer, config.n_head, config.n_embd) == (layers, heads, width)
    with torch.device("meta"):
        model = build_gpt2(config)
    assert parameters(model, trained=True) == count
    # Biases: 3 + 1 + 4 + 1 widths in the linear layers and 2 in the norms of a layer, 1 in the last norm.
    assert parameters(model, trained=False) == layers * 11 * width + width


def test_settings_of_the_paper():
    config = gpt2_config()
    assert (config.vocab_size, config.n_positions) == (50304, 1024)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0
    assert config.scale_attn_by_inverse_layer_idx and config.tie_word_embeddings
    assert config.bos_token_id == config.eos_token_id == 50256


def test_overrides():
    config = gpt2_config("medium", **TINY, resid_pdrop=0.1)
    assert (config.n_layer, config.n_embd, config.vocab_size, config.resid_pdrop) == (3, 32, 97, 0.1)
    assert config.bos_token_id is None and config.eos_token_id is None, "GPT-2's end of text is not in this vocabulary"
    assert gpt2_config(**TINY, eos_token_id=5).eos_token_id == 5


def reference_logits(weights: dict[str, torch.Tensor], ids: torch.Tensor, heads: int, layers: int) -> torch.Tensor:
    """The authors' forward pass, without biases, from the weights alone. ids: (batch, time)."""

    def norm(x, name):
        return layer_norm(x, x.shape[-1:], weights[f"transformer.{name}.weight"], None, 1e-5)

    def project(x, name):
        return linear(x, weights[f"transformer.{name}.weight"].T)

    batch, time = ids.shape
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:time]
    future = torch.ones(time, time, dtype=torch.bool).triu(1)
    for i in range(layers):
        qkv = project(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.view(batch, time, heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) / (i + 1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + project(mixed.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        hidden = gelu(project(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + project(hidden, f"h.{i}.mlp.c_proj")
    return linear(norm(x, "ln_f"), weights["transformer.wte.weight"])


def tiny_model(**arguments):
    torch.manual_seed(0)
    # Weights five times as large as usual, so that attention is far from uniform and its scale matters.
    return build_gpt2(gpt2_config(**TINY, initializer_range=0.1), **arguments)


def test_logits_and_gradients_are_those_of_an_independent_forward_pass():
    model = tiny_model()
    ids = torch.randint(97, (2, 16))
    logits = model(input_ids=ids).logits
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_logits(weights, ids, heads=4, layers=3)
    assert_close(logits, expected, atol=1e-5, rtol=0)
    logits.square().mean().backward()
    expected.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_the_layer_scale_matters_to_that_comparison():
    model = tiny_model()
    ids = torch.randint(97, (2, 16))
    unscaled = AutoModelForCausalLM.from_config(gpt2_config(**TINY, scale_attn_by_inverse_layer_idx=False))
    unscaled.load_state_dict(model.state_dict())
    assert (model(ids).logits - unscaled(ids).logits).abs().max() > 1e-3


def test_initial_values():
    torch.manual_seed(0)
    model = build_gpt2(gpt2_config(n_layer=2, n_head=4, n_embd=256, vocab_size=1000, n_positions=128))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            expected = (0.0, 0.0)
        elif re.search(r"ln_\w+\.weight", name):
            expected = (1.0, 0.0)
        else:
            expected = (0.0, 0.02 / math.sqrt(2 * 2) if "c_proj" in name else 0.02)
        mean, std = p.detach().mean().item(), p.detach().std().item()
        # The smallest matrix has 32,768 entries: its standard deviation is known to 0.4%.
        assert mean == pytest.approx(expected[0], abs=5e-4), name
        assert std == pytest.approx(expected[1], rel=0.02), name
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_seed_decides_the_weights():
    first, second = tiny_model().state_dict(), tiny_model().state_dict()
    torch.manual_seed(1)
    other = build_gpt2(gpt2_config(**TINY)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["transformer.wpe.weight"], other["transformer.wpe.weight"])


@pytest.mark.parametrize("bias", [False, True])
def test_biases_train_only_on_request(bias):
    model = tiny_model(bias=bias)
    assert model.training
    ids = torch.randint(97, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.requires_grad is bias
            assert bool(parameter.any()) is bias, f"{name} moved: {not bias}"
        else:
            assert parameter.requires_grad and parameter.grad is not None, name


def test_a_checkpoint_is_an_ordinary_gpt2(tmp_path):
    model = tiny_model().eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == ["GPT2LMHeadModel"] and "auto_map" not in settings, "a class that is not theirs"
    for name, p in loaded.named_parameters():
        if name.endswith(".bias"):
            assert not p.any(), f"{name} is not 0 any more"
    ids = torch.randint(97, (2, 16))
    assert_close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_the_fused_activation_is_gelu_new():
    model = tiny_model()
    plain = AutoModelForCausalLM.from_config(
        GPT2Config.from_dict({**model.config.to_dict(), "activation_function": "gelu_new"})
    )
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(97, (2, 16))
    assert_close(plain(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        ("huge", {}, "size='huge' is unknown: choose one of small, medium, large, xl"),
        ("small", {"n_embd": 100}, "n_embd=100 is not a multiple of n_head=12"),
        ("small", {"n_layer": 0}, "n_layer=0 must be a whole number"),
        ("small", {"n_head": 2.5}, "n_head=2.5 must be a whole number"),
        ("small", {"vocab_sise": 10}, "vocab_sise=10 is no field of GPT2Config: did you mean 'vocab_size'"),
        ("small", {"hidden_size": 10}, "hidden_size=10 is no field of GPT2Config: did you mean 'n_embd'"),
    ],
)
def test_errors(size, overrides, message):
    with pytest.raises(ValueError, match=message):
        gpt2_config(size, **overrides)


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, mars_hf.models; sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
