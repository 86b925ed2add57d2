"""The comparison of optimizers, with runs of a few steps: what it runs, resumes, tells and refuses."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from mars_hf import MARSTrainingArguments
from mars_hf.training.arguments import mars_hyperparameters
from mars_hf.training.config import parse_config

RECIPE = "recipes/compare_optimizers.py"
SETTINGS = {
    "block_size": 16,
    "vocab_size": 300,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "optim": "mars",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 64,
    "max_steps": 4,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}
GRID = {
    "config": "settings.yaml",
    "seeds": [1, 2],
    "optimizers": {
        "adamw": {"learning_rate": [1e-3], "weight_decay": 0.1},
        # The second diverges.
        "mars-adamw": {"learning_rate": [1e-2, 1e30], "mars_gamma": 0.025},
    },
    "variants": {"mars-adamw": {"mars_gamma": [0.025, 0.0]}},
}
RUNS = [
    "adamw-lr_0.001-seed_1",
    "adamw-lr_0.001-seed_2",
    "mars-adamw-lr_0.01-mars_gamma_0.0-seed_1",
    "mars-adamw-lr_0.01-mars_gamma_0.0-seed_2",
    "mars-adamw-lr_0.01-seed_1",
    "mars-adamw-lr_0.01-seed_2",
    "mars-adamw-lr_1e+30-seed_1",
]


@pytest.fixture(scope="module")
def compare(root, corpus, tmp_path_factory):
    """Runs the longer command of the README with a short grid of its own; returns its folder and the process."""
    commands = re.findall(r"^python (recipes/compare_optimizers.py.*)$", (root / "README.md").read_text(), re.MULTILINE)
    assert commands[0] == RECIPE and len(commands) == 2, "a command of the README would not run here"
    folder = tmp_path_factory.mktemp("compare")
    (folder / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    (folder / "grid.yaml").write_text(yaml.safe_dump(GRID))
    text = folder / "input.txt"
    text.write_text(corpus.read_text()[:20_000])

    def run(*more):
        own = [
            "--grid",
            folder / "grid.yaml",
            "--dataset_path",
            text,
            "--output_dir",
            folder / "out",
            "--cpu_threads",
            1,
        ]
        arguments = [*shlex.split(commands[1]), *map(str, own), *more]
        return subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True)

    return folder / "out", run


@pytest.fixture(scope="module")
def done(compare):
    folder, run = compare
    finished = run()
    assert finished.returncode == 0, finished.stderr
    return folder, finished.stdout


def results(folder, name):
    return json.loads((folder / name / "run.json").read_text())["results"]


def best(folder, name):
    return min(row["eval_loss"] for row in results(folder, name)["history"] if "eval_loss" in row)


def test_each_setting_runs_once(done):
    folder, printed = done
    assert sorted(path.parent.name for path in folder.glob("*/run.json")) == RUNS
    assert printed.count("python recipes/pretrain_gpt2.py") == len(RUNS)
    assert not [*folder.glob("*/final"), *folder.glob("*/checkpoint-*")], "a comparison keeps no models"
    assert "sample" not in results(folder, RUNS[0])


def test_tables_say_what_the_runs_found(done):
    folder, printed = done
    report = json.loads((folder / "comparison.json").read_text(), parse_constant=pytest.fail)
    rows = {(row["optimizer"], row["learning_rate"], *row["changes"].items()): row for row in report["all"]}
    adamw, mars = rows["adamw", 1e-3], rows["mars-adamw", 1e-2]
    assert adamw["losses"] == [best(folder, name) for name in RUNS[:2]]
    assert mars["losses"] == [best(folder, name) for name in RUNS[4:6]]
    assert mars["mean_loss"] == pytest.approx(sum(mars["losses"]) / 2, rel=1e-12)
    assert rows["mars-adamw", 1e-2, ("mars_gamma", 0.0)]["losses"] == [best(folder, name) for name in RUNS[2:4]]
    assert rows["mars-adamw", 1e30]["losses"] == [None]
    assert report["best"] == sorted([adamw, mars], key=lambda row: row["mean_loss"])
    # exp_avg and exp_avg_sq of every trained parameter, and last_grad of the matrices.
    assert 1.3 < mars["optimizer_state_bytes"] / adamw["optimizer_state_bytes"] < 1.5
    for row in report["all"]:
        loss = f"{row['mean_loss']:.4f}" if row["mean_loss"] else "diverged"
        line = rf"\| {row['optimizer']} \| {row['learning_rate']:g} \|.*\| {loss} \| {len(row['seeds'])} \|".replace(
            "+", r"\+"
        )
        assert re.search(line, printed), f"no line {line}"
        assert row["training_seconds"] > 0 and row["peak_memory_bytes"] > 100e6
    assert (folder / "comparison.md").read_text().strip() in printed
    for figure in ("loss_step", "loss_tokens", "loss_time", "learning_rates"):
        assert (folder / f"{figure}.png").read_bytes()[:4] == b"\x89PNG", figure


def test_a_run_that_diverged_says_so(done):
    printed = (done[0] / "mars-adamw-lr_1e+30-seed_1" / "log.txt").read_text()
    assert printed.strip().splitlines()[-1] == "ValueError: eval_loss=nan: it diverged, lower learning_rate=1e+30"


def test_an_interrupted_comparison_goes_on_where_it_was(done, compare):
    folder, printed = done
    lost, lost_results = folder / RUNS[4], results(folder, RUNS[4])
    (lost / "run.json").rename(lost / "run.partial")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/run.json")}
    again = compare[1]()
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a finished run was trained again"
    assert results(folder, RUNS[4])["eval_loss"] == lost_results["eval_loss"]
    losses = re.findall("validation loss .*", printed)
    assert re.findall("validation loss .*", again.stdout) == losses


def test_the_printed_command_repeats_the_run(done, root, tmp_path):
    folder, printed = done
    (line,) = [line for line in printed.splitlines() if line.endswith(str(folder / RUNS[0]))]
    command = [sys.executable, *shlex.split(line)[1:-1], str(tmp_path / "again")]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    repeated = json.loads((tmp_path / "again" / "results.json").read_text())
    assert repeated["eval_loss"] == results(folder, RUNS[0])["eval_loss"]


@pytest.fixture
def main(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "recipes"))
    import compare_optimizers

    return compare_optimizers.main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "shakespear"], "grid='shakespear' is neither a .yaml file nor one of austen, shakespeare_char"),
        (["--optimizers", "adam"], "optimizers='adam' is unknown: did you mean 'adamw'"),
        (["--learning_rate", "1e-3"], "'--learning_rate' is decided by the grid"),
        (["--seed=3"], "'--seed=3' is decided by the grid"),
        (["--learning-rate", "1e-3"], "'--learning-rate' is decided by the grid"),
        (["--weight_decay", "0.3"], "'--weight_decay' is decided by the grid"),
        (["--optimizers", "mars-m", "--mars_clip_c=2"], "'--mars_clip_c=2' is decided by the grid"),
    ],
)
def test_errors_before_any_run(main, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        main([*options, "--output_dir", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {}}, "must have config and optimizers, and nothing but config, seeds, optimizers, variants"),
        ({"optimizers": {"adamw": {"learning_rate": 1e-3}}}, "adamw needs a list of learning rates"),
        ({"optimizers": {"adamw": {"learning_rate": []}}}, "adamw needs a list of learning rates"),
        ({"optimizers": {"adamw": None}}, "optimizers={'adamw': None} must hold settings of each optimizer"),
        ({"optimizers": ["adamw"]}, "optimizers=['adamw'] must hold settings of each optimizer"),
        ({"variants": {"mars_adamw": {}}}, "variants='mars_adamw' is unknown: did you mean 'mars-adamw'"),
        ({"variants": {"adamw": {"mars_gamma": 0}}}, "variants of adamw need a list, mars_gamma: [0]"),
        ({"seeds": 3}, "seeds=3 must be a list"),
        ({"config": "nowhere.yaml"}, "config='nowhere.yaml' is not a file beside it"),
    ],
)
def test_errors_in_a_grid(main, tmp_path, change, message):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**GRID, **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--grid", str(tmp_path / "grid.yaml"), "--output_dir", str(tmp_path / "out")])


def test_results_of_other_settings_are_not_mixed_in(done, main):
    folder, _ = done
    before = (folder / "comparison.json").read_bytes()
    with pytest.raises(ValueError, match=r"run\.json is of a run with other settings: remove it or choose another"):
        main(["--grid", str(folder.parent / "grid.yaml"), "--output_dir", str(folder), "--max_steps", "5"])
    assert (folder / "comparison.json").read_bytes() == before


def test_settings_that_a_file_builds_on_are_not_mixed_in_either(done, main, tmp_path):
    """Nothing in settings.yaml itself tells the two runs apart."""
    import compare_optimizers

    record = json.loads((done[0] / RUNS[0] / "run.json").read_text())
    (tmp_path / "base.yaml").write_text("max_steps: 4\n")
    (tmp_path / "settings.yaml").write_text("base: base.yaml\n")
    folder = tmp_path / "out"
    comparison = compare_optimizers.Comparison(folder, str(tmp_path / "settings.yaml"), [])
    (folder / "adamw-lr_0.1-seed_1").mkdir(parents=True)
    own = ["--optim", "mars", "--mars_type", "adamw", "--learning_rate", "0.1", "--seed", "1"]
    record["identity"] = {"options": own, "config": {"max_steps": 4}}
    (folder / "adamw-lr_0.1-seed_1" / "run.json").write_text(json.dumps(record))
    comparison.run("adamw", 0.1, {}, {}, 1)
    comparison.runs.clear()
    (tmp_path / "base.yaml").write_text("max_steps: 5\n")
    with pytest.raises(ValueError, match="is of a run with other settings"):
        comparison.run("adamw", 0.1, {}, {}, 1)


def test_two_comparisons_do_not_share_a_folder(main, compare, tmp_path):
    import compare_optimizers

    grid = str(compare[0].parent / "grid.yaml")
    with compare_optimizers.alone_in(tmp_path):
        with pytest.raises(ValueError, match="another comparison, or a run that one left behind, is at work") as error:
            main(["--grid", grid, "--output_dir", str(tmp_path)])
        assert "\n" not in str(error.value)
    with compare_optimizers.alone_in(tmp_path):
        pass


def test_a_run_without_results_has_failed(main, compare, tmp_path):
    grid = str(compare[0].parent / "grid.yaml")
    with pytest.raises(ValueError, match=r"^adamw-lr_0.001-seed_1 failed, all of it in \S+log.txt: "):
        main(["--grid", grid, "--output_dir", str(tmp_path), "--dry_run"])


def test_a_run_that_fails_is_told_in_one_line(main, compare, tmp_path):
    grid = str(compare[0].parent / "grid.yaml")
    message = (
        r"^adamw-lr_0.001-seed_1 failed, all of it in \S+log.txt: .*'--lerning_rate', did you mean '--learning_rate'"
    )
    with pytest.raises(ValueError, match=message):
        main(["--grid", grid, "--output_dir", str(tmp_path), "--lerning_rate", "1"])


@pytest.mark.parametrize("grid", ["austen", "shakespeare_char"])
def test_grids_hold_settings_that_the_recipe_takes(main, root, grid):
    import compare_optimizers
    import pretrain_gpt2

    found = compare_optimizers.read_grid(grid)
    assert list(found["optimizers"]) == [
        "adamw",
        "muon",
        "moonlight",
        "mars-adamw",
        "mars-lion",
        "mars-shampoo",
        "mars-m",
    ]
    assert found["seeds"] == [1, 2, 3]
    for name in ("mars-adamw", "mars-m"):
        assert found["variants"][name] == {"mars_gamma": [0, 0.025, 0.05, 0.1], "mars_clip_c": [1, 0]}
    types = [pretrain_gpt2.DataArguments, pretrain_gpt2.ModelArguments, pretrain_gpt2.EvaluationArguments]
    for name, settings in found["optimizers"].items():
        rates = settings.pop("learning_rate")
        assert len(rates) == 3 and all(isinstance(lr, float) for lr in rates), f"{name}: YAML reads 3e-3 as text"
        own = {"optim": "mars", "mars_type": name, "learning_rate": rates[0], **settings}
        words = [word for key, value in own.items() for word in (f"--{key}", str(value))]
        *_, args = parse_config([*types, MARSTrainingArguments], ["--config", found["config"], *words])
        assert mars_hyperparameters(args)["mars_type"] == name
        assert mars_hyperparameters(args)["lr"] == rates[0]
