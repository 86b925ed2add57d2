"""What a comparison of optimizers found: the best runs, tables and figures."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars_hf.plots import plot_learning_rates, plot_loss


@dataclass(frozen=True)
class Run:
    """A finished run, and what recipes/pretrain_gpt2.py left in its results.json.

    `changes` are the settings of a variant that differ from those that the grid gives to the optimizer.
    """

    optimizer: str
    learning_rate: float
    changes: dict[str, Any]
    seed: int
    results: dict[str, Any]

    @property
    def loss(self) -> float:
        """The lowest loss of all evaluations, in nats a token; infinite where each was NaN."""
        losses = (row["eval_loss"] for row in self.results["history"] if "eval_loss" in row)
        return min((loss for loss in losses if math.isfinite(loss)), default=math.inf)

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The evaluations, with the tokens seen until then."""
        tokens = self.results["settings"]["tokens_per_step"]
        rows = (row for row in self.results["history"] if "eval_loss" in row)
        return [{**row, "num_input_tokens_seen": row["step"] * tokens} for row in rows]


def best_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """The run with the lowest loss of each optimizer, variants left out."""
    best: dict[str, Run] = {}
    for run in runs:
        if not run.changes and run.loss <= best.get(run.optimizer, run).loss:
            best[run.optimizer] = run
    return best


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for the seeds of each setting, in the order of the runs."""
    seeds: dict[str, list[Run]] = {}
    for run in runs:
        seeds.setdefault(json.dumps([run.optimizer, run.learning_rate, run.changes]), []).append(run)
    return [_summary(same) for same in seeds.values()]


def _summary(runs: list[Run]) -> dict[str, Any]:
    costs = [run.results["cost"] for run in runs]
    mean = statistics.fmean(run.loss for run in runs)
    return {
        "optimizer": runs[0].optimizer,
        "learning_rate": runs[0].learning_rate,
        "changes": runs[0].changes,
        "seeds": [run.seed for run in runs],
        # JSON knows no infinity.
        "losses": [run.loss if math.isfinite(run.loss) else None for run in runs],
        "mean_loss": mean if math.isfinite(mean) else None,
        **{name: statistics.median(cost[name] for cost in costs) for name in costs[0]},
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Summaries in Markdown."""
    header = ["optimizer", "learning rate", "changed", "validation loss", "seeds", "lowest to highest"]
    lines = [[*header, "seconds", "state", "memory"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        mean, changes = row["mean_loss"], ", ".join(f"{name} {value}" for name, value in row["changes"].items())
        spread = f"{min(row['losses']):.4f} to {max(row['losses']):.4f}" if mean and len(row["seeds"]) > 1 else ""
        line = [row["optimizer"], f"{row['learning_rate']:g}", changes, f"{mean:.4f}" if mean else "diverged"]
        sizes = [f"{row[name] / 1e6:.1f} MB" for name in ("optimizer_state_bytes", "peak_memory_bytes")]
        lines.append([*line, str(len(row["seeds"])), spread, f"{row['training_seconds']:.0f}", *sizes])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(runs: Sequence[Run], folder: Path) -> str:
    """Writes comparison.md, comparison.json and the figures.

    Args:
        runs: all of them, each once.
        folder: where to; it exists.

    Returns:
        The tables, in Markdown.
    """
    rows, best = summarise(runs), best_runs(runs)
    plain = [row for row in rows if not row["changes"]]
    chosen = [row for row in plain if row["learning_rate"] == best[row["optimizer"]].learning_rate]
    chosen.sort(key=lambda row: row["mean_loss"] or math.inf)
    text = "\n\n".join(
        [
            "# Comparison of optimizers",
            "Validation loss: the lowest of all evaluations of a run, in nats a token, mean over the seeds. Seconds: "
            "spent in optimizer steps, median over the seeds. State: of the optimizer. Memory: peak of CUDA's "
            "allocator, elsewhere of the whole process.",
            "## Each at the best of its learning rates",
            table(chosen),
            "## All settings",
            table(rows),
        ]
    )
    (folder / "comparison.md").write_text(text + "\n")
    (folder / "comparison.json").write_text(json.dumps({"best": chosen, "all": rows}, indent=1))
    curves = {f"{name}, {run.learning_rate:g}": run.curve for name, run in best.items()}
    for x in ("step", "tokens", "time"):
        plot_loss(curves, folder / f"loss_{x}.png", x=x)
    # The first seed alone, which all learning rates have.
    points = {
        name: [(row["learning_rate"], row["losses"][0] or math.inf) for row in plain if row["optimizer"] == name]
        for name in best
    }
    plot_learning_rates(points, folder / "learning_rates.png")
    return text
