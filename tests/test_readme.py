"""The README's commands and code, run as they stand."""

import os
import re
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


@pytest.mark.parametrize("command", [c for c in COMMANDS[2:] if c.startswith("accelerate launch")])
def test_launch_commands_run(command, launch, tmp_path):
    arguments = shlex.split(command)[2:]
    output = arguments.index("--output_dir")
    assert arguments[output + 1].startswith("runs/")
    arguments[output + 1] = str(tmp_path)
    launch(*arguments, *SHORT.split())
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_other_commands_of_the_readme_are_known():
    known = (
        "python3 -m venv",
        "accelerate launch",
        "python recipes/bench_step.py",
        "python recipes/evaluate_downstream.py",
    )
    assert all(command.startswith(known) for command in COMMANDS)
