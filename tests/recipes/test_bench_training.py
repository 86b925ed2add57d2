"""The benchmark of whole training steps: that both sides train the same thing, and that it runs."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from mars_hf.models import build_gpt2, gpt2_config


@pytest.fixture(scope="module")
def bench(root):
    spec = importlib.util.spec_from_file_location("bench_training", root / "recipes" / "bench_training.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_model_is_the_model_of_the_recipe(bench):
    """The same function of the same weights, so that the two sides do the same work."""
    ours = build_gpt2(gpt2_config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=8))
    plain = bench.PlainGPT2(2, 2, 16, 40, 8)
    state = {"tokens.weight": ours.transformer.wte.weight, "positions.weight": ours.transformer.wpe.weight}
    state["norm.weight"] = ours.transformer.ln_f.weight
    for i, block in enumerate(ours.transformer.h):
        names = {"norms.0": block.ln_1, "norms.1": block.ln_2, "qkv": block.attn.c_attn, "out": block.attn.c_proj}
        names |= {"up": block.mlp.c_fc, "down": block.mlp.c_proj}
        state |= {f"blocks.{i}.{name}.weight": module.weight.t() for name, module in names.items()}
    plain.load_state_dict(state)
    tokens = torch.randint(40, (3, 8))
    loss = plain(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, ours(input_ids=tokens, labels=tokens).loss, rtol=1e-5, atol=1e-6)
    trained = sum(p.numel() for p in ours.parameters() if p.requires_grad)
    assert sum(p.numel() for p in plain.parameters()) == trained, "parameters that train"


def test_the_benchmark_runs(root, tmp_path):
    command = [sys.executable, "recipes/bench_training.py", "--rounds", "1", "--steps", "3", "--warmup", "1"]
    command += ["--block_size", "16", "--batch_size", "2", "--threads", "1", "--output", str(tmp_path / "rates.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "rates.json").read_text())["figures"]
    sides = ["plain loop, adamw", "the same, memory kept", "recipe, adamw", "recipe, mars", "recipe, mars, mars_fused"]
    assert list(figures) == sides
    assert all(one["tokens_per_second"] > 0 and one["peak_gb"] > 0.1 for (one,) in figures.values())
    assert all(side in done.stdout for side in sides)
