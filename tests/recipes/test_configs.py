"""Every YAML file of the repository, and the benchmark."""

import json
import subprocess
import sys

import pytest
import yaml

from mars_hf.training.config import parse_config


def test_every_recipe_config_parses(root, tmp_path, recipe):
    """Each setting of each file arrives, of files that others build on too, but for grids."""
    configs = sorted((root / "recipes" / "configs").rglob("*.yaml"))
    assert configs
    for path in configs:
        if path.parent.name == "compare":
            continue
        settings = yaml.safe_load(path.read_text())
        parsed = parse_config(recipe.ARGUMENTS, ["--config", str(path), "--output_dir", str(tmp_path)])
        values = {name: value for part in parsed for name, value in vars(part).items()}
        for name in settings.keys() - {"base", "output_dir", "lr_scheduler_type", "eval_strategy", "report_to"}:
            assert values[name] == settings[name], f"{path.name}: {name}"


@pytest.mark.parametrize(
    "optimizers", [["mars-adamw", "mars-lion"], ["mars-m", "mars-shampoo", "torch-muon", "adamw", "mars-adamw-fused"]]
)
def test_benchmark_runs(root, tmp_path, optimizers, compiler):
    output = tmp_path / "step.json"
    command = [sys.executable, "recipes/bench_step.py", "--model", "tiny", "--rounds", "2", "--warmup", "1"]
    command += ["--output", str(output), "--optimizers", *optimizers]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = json.loads(output.read_text())["seconds"]
    assert list(times) == ["torch-adamw", *optimizers]
    assert all(len(values) == 2 for values in times.values())
    assert [row.split(" | ")[0].removeprefix("| ") for row in done.stdout.splitlines()[3:]] == list(times)


def test_benchmark_says_that_a_device_is_not_there(root):
    command = [sys.executable, "recipes/bench_step.py", "--model", "tiny", "--device", "nowhere"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert "argument --device: nowhere cannot be used: " in done.stderr.splitlines()[-1]
