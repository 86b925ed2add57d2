"""The README's commands and code, run as they stand."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines() if line.strip()]
# Only what makes a run short; the two-process command is long enough to have its own test too.
SHORT = (
    "--max_steps 2 --n_layer 1 --n_embd 32 --per_device_train_batch_size 2 --eval_strategy no --save_strategy no "
    "--sample_tokens 4 --lm_eval_limit 1 --lm_eval_tasks arc_easy"
)


def test_the_two_commands_come_first_and_ci_runs_the_second():
    assert COMMANDS[0].endswith("&& accelerate launch recipes/pretrain_gpt2.py")
    assert COMMANDS[1].endswith("&& pytest")
    ci = (Path(__file__).parents[1] / ".ci" / "run").read_text()
    assert "grep -m1 '&& pytest$' README.md" in ci
    for command in COMMANDS[:2]:
        assert '-c constraints.txt -e ".[' in command


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.split("\n")[0])
def test_python_blocks_run(code, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning:mars_hf", "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# Eight GPUs for days: only planned here.
PUBLISHED = [c for c in COMMANDS if "recipes/configs/gpt2_" in c]


@pytest.mark.parametrize("command", PUBLISHED)
def test_commands_of_published_runs_are_planned(command, root, tmp_path, monkeypatch, capsys):
    options = command.split("pretrain_gpt2.py ")[1]
    plan = "" if "--dry_run" in options else "--dry_run --processes 8"
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root / "recipes")  # where Python looks for a script's neighbours
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py", *shlex.split(options), *plan.split()])
    runpy.run_path("recipes/pretrain_gpt2.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert "491,520 tokens" in printed and "49,152,000,000 tokens" in printed, printed


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS[2:] if c.startswith("accelerate launch") and c not in PUBLISHED]
)
def test_launch_commands_run(command, launch, tmp_path):
    arguments = shlex.split(command)[2:]
    output = arguments.index("--output_dir")
    assert arguments[output + 1].startswith("runs/")
    arguments[output + 1] = str(tmp_path)
    launch(*arguments, *SHORT.split())
    assert (tmp_path / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python recipes/prepare_data.py")])
def test_prepare_commands_run(command, tmp_path):
    """From the Hub, as far as it gets where the Hub is a port that nobody listens at; local files to the end."""
    from mars_hf.data import read_tokens, train_tokenizer

    arguments = shlex.split(command)[1:]
    arguments[arguments.index("--output_dir") + 1] = str(tmp_path / "out")
    if "--tokenizer_name" in arguments:
        train_tokenizer([README], 300).save_pretrained(tmp_path / "tokenizer")
        arguments[arguments.index("--tokenizer_name") + 1] = str(tmp_path / "tokenizer")
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True
    )
    if "--dataset_name" in arguments:
        assert done.returncode == 1 and "which does not answer: give --dataset_path" in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert len(read_tokens(tmp_path / "out" / "train.bin")) > 1000
        assert "2 files and manifest.json" in done.stdout


def test_other_commands_of_the_readme_are_known():
    assert len(PUBLISHED) == 3
    known = ("python3 -m venv", "accelerate launch", "python recipes/bench_step.py", "python recipes/pretrain_gpt2.py")
    known += ("python recipes/import_checkpoint.py --checkpoint ",)  # by tests/recipes/test_import_checkpoint.py
    known += ("python recipes/prepare_data.py",)
    known += ("python recipes/compare_optimizers.py", "python recipes/bench_training.py")
    known += ("python recipes/evaluate_downstream.py",)
    assert all(command.startswith(known) for command in COMMANDS)
