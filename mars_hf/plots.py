"""Figures of one or several runs: loss curves from the Trainer's log history, loss against the learning rate."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What each choice of x reads from a row of the history, and its units, largest first: the first one that the longest
# run fills at least twice names the axis.
X_KEYS = {"step": "step", "tokens": "num_input_tokens_seen", "time": "elapsed_seconds"}
UNITS: dict[str, dict[str, float]] = {
    "step": {"step": 1},
    "tokens": {"tokens (billions)": 1e9, "tokens (millions)": 1e6, "tokens (thousands)": 1e3, "tokens": 1},
    "time": {"time (days)": 86400, "time (hours)": 3600, "time (minutes)": 60, "time (seconds)": 1},
}

# Okabe and Ito's colours, which colour-blind readers tell apart, from dark to light; each run also has its own line
# style and marker, for print in grey.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
# One marker more than colours, so that the seventh run does not look like the first.
MARKERS = "osD^vPX"
MOST_MARKERS = 20

History = Sequence[Mapping[str, Any]]


def plot_loss(runs: Mapping[str, History], path: str | Path, *, x: str = "step") -> Path:
    """Draws training loss (thin) and evaluation loss (with markers) of several runs into one file.

    The vertical axis leaves out the first twentieth of each curve, where the loss of a fresh model falls from far above
    everything that comes later (a curve of fewer than 20 points is shown whole).

    Args:
        runs: Name of each run to its history, a list of rows as in `trainer.state.log_history`. Read are "loss" and
            "eval_loss" (nats per token), and for `x` "step" (optimizer steps), "num_input_tokens_seen" (tokens) or
            "elapsed_seconds" (seconds); rows without them are skipped.
        path: File to write; its suffix chooses the format (.png, .svg, .pdf, ...). Missing folders are made.
        x: "step", "tokens" or "time".

    Returns:
        The path written.

    Raises:
        ValueError: Unknown `x` or suffix, no run, or a run without any point to draw.
        ImportError: matplotlib is missing.
    """
    path = Path(path)
    if x not in X_KEYS:
        raise ValueError(f"x={x!r} is unknown: choose one of {', '.join(X_KEYS)}")
    if not runs:
        raise ValueError("runs is empty: give at least one name with its history")
    curves = {name: _curves(name, history, X_KEYS[x]) for name, history in runs.items()}
    figure, axes = _empty(path)

    longest = max(at for pair in curves.values() for points in pair for at, _ in points)
    x_label = next((label for label, unit in UNITS[x].items() if longest >= 2 * unit), list(UNITS[x])[-1])
    scale = UNITS[x][x_label]

    for i, (name, (training, evaluation)) in enumerate(curves.items()):
        style = _style(i)
        if training:
            # One entry per run in the legend: that of its evaluation, where it has one.
            label = "_hidden" if evaluation else f"{name} (training)"
            axes.plot(*_scaled(training, scale), linewidth=0.8, alpha=0.55, label=label, **style)
        if evaluation:
            every = 1 + (len(evaluation) - 1) // MOST_MARKERS
            axes.plot(*_scaled(evaluation, scale), linewidth=1.8, label=name, markevery=every, **style, **_marker(i))

    settled = [loss for pair in curves.values() for points in pair for _, loss in points[len(points) // 20 :]]
    finite = [loss for loss in settled if math.isfinite(loss)]
    margin = 0.05 * (max(finite) - min(finite)) if finite else 0
    if margin:
        axes.set_ylim(min(finite) - margin, max(finite) + margin)
    if x == "step":
        axes.locator_params(axis="x", integer=True)
    title = "thin: training, markers: evaluation" if any(training for training, _ in curves.values()) else None
    return _write(figure, path, x_label, "loss (nats per token)", title)


def plot_learning_rates(runs: Mapping[str, Sequence[tuple[float, float]]], path: str | Path) -> Path:
    """Draws the loss of several optimizers against the learning rate, on a logarithmic axis, into one file.

    Args:
        runs: Name of each optimizer to its points (learning rate, loss in nats per token); a loss that is not finite,
            that of a run which diverged, is left out.
        path: File to write, as in `plot_loss`.

    Returns:
        The path written.

    Raises:
        ValueError: Unknown suffix, or no run.
        ImportError: matplotlib is missing.
    """
    path = Path(path)
    if not runs:
        raise ValueError("runs is empty: give at least one name with its points")
    figure, axes = _empty(path)
    axes.set_xscale("log")
    for i, (name, points) in enumerate(runs.items()):
        finite = sorted(point for point in points if math.isfinite(point[1]))
        axes.plot(*_scaled(finite, 1), linewidth=1.8, label=name, **_style(i), **_marker(i))
    return _write(figure, path, "learning rate", "loss (nats per token)")


def _empty(path: Path) -> tuple[Any, Any]:
    """A figure with axes, where the format of the path can be written."""
    try:
        # Figure instead of pyplot: the user's backend and open figures stay as they are.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "mars-hf[plot]"') from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ValueError(f"path={str(path)!r} must end in one of {', '.join(f'.{name}' for name in sorted(formats))}")
    return figure, figure.add_subplot()


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i % len(LINES)]}


def _marker(i: int) -> dict[str, Any]:
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "markeredgecolor": "white"}


def _write(figure: Any, path: Path, x_label: str, y_label: str, title: str | None = None) -> Path:
    """Labels the axes, adds the legend, and saves."""
    (axes,) = figure.axes
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, handlelength=3.5, title=title, title_fontsize="small", alignment="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _curves(name: str, history: History, x_key: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Points (x, loss) of training and of evaluation."""
    training, evaluation = (
        [(row[x_key], row[key]) for row in history if x_key in row and key in row] for key in ("loss", "eval_loss")
    )
    if not training and not evaluation:
        seen = ", ".join(sorted({key for row in history for key in row})) or "nothing"
        raise ValueError(f"run {name!r} has no row with {x_key!r} and 'loss' or 'eval_loss' (seen: {seen})")
    return training, evaluation


def _scaled(points: list[tuple[float, float]], scale: float) -> tuple[list[float], list[float]]:
    return [at / scale for at, _ in points], [loss for _, loss in points]
