"""Compares optimizers: the runs of a grid one after another, then tables and figures.

    python recipes/compare_optimizers.py
    python recipes/compare_optimizers.py --dataset_path my_books/ --output_dir runs/compare_books
    python recipes/compare_optimizers.py --grid shakespeare_char --dataset_path input.txt
    python recipes/compare_optimizers.py --optimizers adamw mars-m --seeds 1 --no_variants --max_steps 200

The grid is a file of recipes/configs/compare/, by name, or one of your own. Every run is recipes/pretrain_gpt2.py, and
the command that repeats it is printed; options that this script does not know go to every run. First each learning
rate is tried with the first seed; the best one of each optimizer is repeated with the other seeds; the variants of the
grid run at that learning rate. A comparison that was interrupted goes on with the same command: finished runs are read,
an unfinished one starts again. It keeps figures, not models.
"""

import argparse
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretrain_gpt2
import yaml
from comparison import Run, best_runs, write_report

from mars_hf.optim.hyper import one_of
from mars_hf.optim.rules import RULES
from mars_hf.training.config import read_settings

GRIDS = Path(__file__).parent / "configs" / "compare"
KEYS = ("config", "seeds", "optimizers", "variants")
# Losses are compared: no scores, no samples and no checkpoints, unless the command line asks for them.
LOSS_ALONE = ["--lm_eval_tasks", "none", "--sample_tokens", "0", "--save_strategy", "no"]
# What the grid decides, for each run.
OF_THE_GRID = ("config", "optim", "mars_type", "learning_rate", "seed", "output_dir")


@dataclass
class Comparison:
    """One folder, what all its runs share, and the runs so far, by name."""

    folder: Path
    config: str
    options: list[str]
    runs: dict[str, Run] = field(default_factory=dict)

    def run(self, optimizer: str, lr: float, settings: dict[str, Any], changes: dict[str, Any], seed: int) -> None:
        """Reads a finished run, or trains it.

        Args:
            optimizer: a rule of `MARS`.
            lr: the matrices' peak learning rate.
            settings: further settings that the grid gives to this optimizer.
            changes: those of a variant that differ from them.
            seed: of the initial weights and of the order of the data.
        """
        varied = {"lr": lr, **changes, "seed": seed}
        name = "-".join([optimizer, *(f"{key}_{value}" for key, value in varied.items())])
        if name in self.runs:
            return
        own = {"optim": "mars", "mars_type": optimizer, "learning_rate": lr, **settings, **changes, "seed": seed}
        options = [*self.options, *(word for key, value in own.items() for word in (f"--{key}", str(value)))]
        # Settings changed in the file, or in one that it builds on, make another run too.
        identity = {"options": options, "config": read_settings(self.config)}
        options = ["--config", self.config, *options, "--output_dir", str(self.folder / name)]
        command = shlex.join(["python", os.path.relpath(pretrain_gpt2.__file__), *options])
        print(f"\n{name}\n    {command}", flush=True)
        record = self.folder / name / "run.json"
        if record.is_file():
            saved = json.loads(record.read_text())
            if saved["identity"] != identity:
                raise ValueError(f"{record} is of a run with other settings: remove it or choose another --output_dir")
        else:
            saved = {"identity": identity, "results": train(options, record.parent)}
            partial = record.with_suffix(".partial")
            partial.write_text(json.dumps(saved))
            os.replace(partial, record)
        self.runs[name] = Run(optimizer, lr, changes, seed, saved["results"])
        print(f"    validation loss {self.runs[name].loss:.4f}", flush=True)


def train(options: list[str], folder: Path) -> dict[str, Any]:
    """Runs the recipe afresh in a process of its own, which starts with the libraries loaded; returns its results.

    Raises:
        ValueError: it failed; with the last line that it printed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    process = multiprocessing.get_context("fork").Process(target=_recipe, args=(options, log))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
        process.join()
        raise
    found = folder / "results.json"
    results = json.loads(found.read_text()) if found.is_file() else {}
    # A run that diverged ends with an error, and is a result.
    if not results or (process.exitcode and math.isfinite(results["eval_loss"])):
        last = (log.read_text().strip().splitlines() or ["nothing was printed"])[-1]
        raise ValueError(f"{folder.name} failed, all of it in {log}: {last}")
    shutil.rmtree(folder / "final")
    return results


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other comparisons out of a folder, also while a run of a killed one goes on in it.

    Raises:
        ValueError: there is another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The process of a run inherits the lock.
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output_dir={str(folder)!r}: another comparison, or a run that one left behind, is at work there: "
                "wait for it or choose another folder"
            ) from None
        yield


def _recipe(options: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    pretrain_gpt2.main(options)


def read_grid(name: str) -> dict[str, Any]:
    """The grid of a name in recipes/configs/compare/ or of a file, with the path of its `config` from here.

    Raises:
        ValueError: there is no such file, or it is no grid.
    """
    path = Path(name) if name.endswith(".yaml") else GRIDS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(grid.stem for grid in GRIDS.glob("*.yaml")))
        raise ValueError(f"grid={name!r} is neither a .yaml file nor one of {known}")
    grid = yaml.safe_load(path.read_text())
    if not isinstance(grid, dict) or not {"config", "optimizers"} <= grid.keys() <= set(KEYS):
        raise ValueError(f"grid={name!r} must have config and optimizers, and nothing but {', '.join(KEYS)}")
    grid = {"seeds": [1], "variants": {}, **grid}
    if not isinstance(grid["seeds"], list) or not grid["seeds"]:
        raise ValueError(f"grid={name!r}: seeds={grid['seeds']!r} must be a list, [1, 2, 3]")
    for key in ("optimizers", "variants"):
        if not isinstance(grid[key], dict) or not all(isinstance(own, dict) for own in grid[key].values()):
            raise ValueError(f"grid={name!r}: {key}={grid[key]!r} must hold settings of each optimizer, by its name")
    for optimizer, settings in grid["optimizers"].items():
        one_of("optimizers", optimizer, RULES)
        if not isinstance(settings.get("learning_rate"), list) or not settings["learning_rate"]:
            raise ValueError(f"grid={name!r}: {optimizer} needs a list of learning rates, learning_rate: [...]")
    for optimizer, changes in grid["variants"].items():
        one_of("variants", optimizer, grid["optimizers"])
        for key, values in changes.items():
            if not isinstance(values, list):
                raise ValueError(f"grid={name!r}: variants of {optimizer} need a list, {key}: [{values}]")
    config = path.parent / grid["config"]
    if not config.is_file():
        raise ValueError(f"grid={name!r}: config={grid['config']!r} is not a file beside it: give its relative path")
    return {**grid, "config": os.path.relpath(config)}


def compare(
    comparison: Comparison,
    settings: dict[str, dict[str, Any]],
    rates: dict[str, list[float]],
    variants: dict[str, dict[str, list[Any]]],
    seeds: Sequence[int],
) -> None:
    """Trains what is missing of a grid, and reports on all of it, whatever ends it."""
    try:
        for name in settings:
            for lr in rates[name]:
                comparison.run(name, lr, settings[name], {}, seeds[0])
        best = {name: run.learning_rate for name, run in best_runs([*comparison.runs.values()]).items()}
        for seed in seeds[1:]:
            for name, lr in best.items():
                comparison.run(name, lr, settings[name], {}, seed)
        for seed in seeds:
            for name in variants:
                for values in itertools.product(*variants[name].values()):
                    varied = dict(zip(variants[name], values))
                    changes = {key: value for key, value in varied.items() if settings[name].get(key) != value}
                    comparison.run(name, best[name], settings[name], changes, seed)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on with the run that was not finished.", flush=True)
        sys.exit(130)
    finally:
        if comparison.runs:
            report = write_report([*comparison.runs.values()], comparison.folder)
            print(f"\n{report}\n\ntables and figures: {comparison.folder}", flush=True)


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--grid", default="austen", help="name of a file in recipes/configs/compare/, or a .yaml file")
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="only these of the grid")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="instead of those of the grid")
    parser.add_argument("--no_variants", action="store_true", help="leave the variants of the grid out")
    parser.add_argument("--output_dir", help="default: runs/compare_GRID")
    args, rest = parser.parse_known_args(options)
    grid = read_grid(args.grid)
    for name in args.optimizers or ():
        one_of("optimizers", name, grid["optimizers"])
    settings = {name: grid["optimizers"][name] for name in args.optimizers or grid["optimizers"]}
    rates = {name: [float(lr) for lr in own.pop("learning_rate")] for name, own in settings.items()}
    variants = (
        {} if args.no_variants else {name: grid["variants"][name] for name in settings if name in grid["variants"]}
    )
    # What an optimizer has in the grid would win over the command line, without a word.
    decided = {*OF_THE_GRID}.union(*settings.values(), *variants.values())
    for word in rest:
        if word.startswith("--") and word[2:].split("=")[0].replace("-", "_") in decided:
            raise ValueError(f"{word!r} is decided by the grid: write one of your own for --grid")
    seeds = args.seeds or grid["seeds"]
    folder = Path(args.output_dir or f"runs/compare_{Path(args.grid).stem}")
    comparison = Comparison(folder, grid["config"], [*LOSS_ALONE, *rest])
    with alone_in(folder):
        compare(comparison, settings, rates, variants, seeds)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
