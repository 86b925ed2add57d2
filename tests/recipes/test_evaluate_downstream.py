"""Checkpoints beside the rows of the paper, on one process and on two."""

import json
import os
import subprocess
import sys

import pytest

RECIPE = "recipes/evaluate_downstream.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    from mars_hf.data import load_text_corpus, train_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer([load_text_corpus()["train"]["text"][0][:20_000]], 300)
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 1, "initializer_range": 0.3}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_processes_score_as_one(checkpoint, root, launch, tmp_path):
    """The command of the README, and the same on two processes."""
    (command,) = (line for line in (root / "README.md").read_text().split("\n") if line.startswith(f"python {RECIPE}"))
    options = command.replace("runs/quickstart/final", str(checkpoint)).replace("--limit 50", "--limit 7").split()[1:]
    assert options[-2] == "--output_dir"
    printed = {}
    for name, launcher in {"one": [], "two": ["--config_file", "accelerate_configs/ddp_cpu.yaml"]}.items():
        printed[name] = launch(*launcher, *options[:-1], tmp_path / name).stdout
    one, two = (json.loads((tmp_path / name / "downstream.json").read_text()) for name in ("one", "two"))
    counts = [next(iter(result["results"].values())).pop("processes") for result in (one, two)]
    assert counts == [1, 2], "the second launch was one of two processes"
    assert one == two, "the results"
    table = (tmp_path / "one" / "downstream.md").read_text()
    assert table in printed["one"] and table in printed["two"], "printed once, as written"
    assert "GPT-2 XL, MARS-AdamW (paper)" in table and "embedded subset: first 7 of 2,376 test items" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no items for 'sciq': its dataset 'allenai/sciq'"),
        (["--tasks", "arc_easy,gsm8k"], "tasks: 'gsm8k' is not in the paper's table"),
        (["--batch_size", "big"], "batch_size: 'big' is not allowed"),
    ],
)
def test_errors_are_one_line(checkpoint, root, options, message):
    command = [sys.executable, RECIPE, str(checkpoint), *options]
    done = subprocess.run(command, cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and message in last and "Traceback" not in done.stderr, done.stderr


def test_what_was_scored_before_a_failure_is_kept(checkpoint, root, tmp_path):
    options = [checkpoint, tmp_path / "none", "--tasks", "boolq", "--limit", "1", "--output_dir", tmp_path]
    command = [sys.executable, RECIPE, *map(str, options)]
    done = subprocess.run(command, cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 1 and "no causal language model found" in done.stderr, done.stderr
    assert list(json.loads((tmp_path / "downstream.json").read_text())["results"]) == [str(checkpoint)]
    assert str(checkpoint) in (tmp_path / "downstream.md").read_text()
