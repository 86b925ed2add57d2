"""What the figure shows, read from its SVG, and what it must leave alone."""

import math
import re
import struct
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")

from mars_hf.plots import plot_learning_rates, plot_loss


def history(steps: int, offset: float = 0.0, evaluate: bool = True, **per_step: float) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        at = {"step": step, **{key: value * step for key, value in per_step.items()}}
        rows.append({"loss": 3 + 8 / step + offset, **at})
        if evaluate and step % 5 == 0:
            rows.append({"eval_loss": 3.1 + 8 / step + offset, **at})
    return [*rows, {"step": steps, "train_runtime": 1.0, "train_loss": 4.0}]


def svg(runs, tmp_path, **arguments) -> str:
    return plot_loss(runs, tmp_path / "loss.svg", **arguments).read_text()


def shown(text: str) -> list[str]:
    """The texts of a figure; matplotlib draws letters as shapes and leaves the text in a comment."""
    return re.findall(r"<!-- (.*?) -->", text)


def lines(text: str) -> list[str]:
    """The curves: paths that are clipped to the axes, grid lines (two points, grey) left out."""
    paths = re.findall(r'<path d="[^"]*" clip-path[^>]*>', text)
    return [path for path in paths if "#b0b0b0" not in path]


def test_two_runs_differ_by_more_than_colour(tmp_path):
    text = svg({"AdamW": history(40), "MARS": history(40, -0.2)}, tmp_path)
    assert {"AdamW", "MARS", "step", "loss (nats per token)"} <= set(shown(text))
    curves = lines(text)
    assert len(curves) == 4, "training and evaluation of two runs"
    assert len({re.search("stroke-dasharray[^;]*|$", curve).group() for curve in curves}) >= 3
    assert ["stroke-width: 0.8" in curve for curve in curves] == [True, False, True, False]
    markers = re.findall(r'<g clip-path="[^"]*">\s*<use xlink:href="#(\w+)"', text)
    assert len(set(markers)) == 2


def test_a_run_without_evaluation_is_named_too(tmp_path):
    text = svg({"short": history(10, evaluate=False)}, tmp_path)
    assert "short (training)" in shown(text) and len(lines(text)) == 1


@pytest.mark.parametrize(
    ("x", "per_step", "label", "last_tick"),
    [
        ("step", 1, "step", "40"),
        ("tokens", 1e8, "tokens (billions)", "4.0"),
        ("tokens", 10, "tokens", "400"),
        ("time", 3, "time (minutes)", "2.00"),
        ("time", 1, "time (seconds)", "40"),
        ("time", 1800, "time (hours)", "20.0"),
    ],
)
def test_the_horizontal_axis_has_a_unit_of_the_right_size(tmp_path, x, per_step, label, last_tick):
    rows = history(40, num_input_tokens_seen=per_step, elapsed_seconds=per_step)
    texts = shown(svg({"run": rows}, tmp_path, x=x))
    assert label in texts and last_tick in texts


def test_the_first_fall_does_not_flatten_the_rest(tmp_path):
    falling = [{"step": 1, "loss": 1000.0}, *({"step": s, "loss": 3 + 1 / s} for s in range(2, 100))]
    assert not {"1000", "800", "200"} & set(shown(svg({"run": falling}, tmp_path)))
    assert "1000" in shown(svg({"run": falling[:10]}, tmp_path)), "a short curve is shown whole"


def test_losses_that_are_not_finite_leave_a_gap(tmp_path):
    rows = [{"step": s, "loss": loss} for s, loss in enumerate([4.0, math.nan, math.inf, 3.0, 2.0])]
    assert len(lines(svg({"run": rows}, tmp_path))) == 1
    svg({"run": [{"step": 1, "loss": math.nan}]}, tmp_path)
    svg({"run": [{"step": 1, "loss": 2.0}]}, tmp_path)


def test_png_into_a_new_folder(tmp_path):
    path = plot_loss({"run": history(10)}, str(tmp_path / "new" / "loss.png"))
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:]) == (1050, 675)


def test_the_backend_and_open_figures_of_the_user_are_left_alone(tmp_path):
    code = (
        "import sys; from mars_hf.plots import plot_loss; assert 'matplotlib' not in sys.modules\n"
        f"plot_loss({{'a': [{{'step': 1, 'loss': 1.0}}]}}, {str(tmp_path / 'a.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors(tmp_path, monkeypatch):
    path, runs = tmp_path / "loss.png", {"run": history(3)}
    with pytest.raises(ValueError, match=r"run 'empty' has no row with 'step' .*\(seen: nothing\)"):
        plot_loss({**runs, "empty": []}, path)
    with pytest.raises(
        ValueError, match=r"no row with 'elapsed_seconds' .*\(seen: loss, step, train_loss, train_runtime\)"
    ):
        plot_loss(runs, path, x="time")
    with pytest.raises(ValueError, match="x='epoch' is unknown: choose one of step, tokens, time"):
        plot_loss(runs, path, x="epoch")
    with pytest.raises(ValueError, match="runs is empty"):
        plot_loss({}, path)
    for name in ("loss.xyz", "loss"):
        with pytest.raises(ValueError, match=rf"{name}' must end in one of .*\.png"):
            plot_loss(runs, tmp_path / name)
    assert not list(tmp_path.iterdir()), "nothing is written on an error"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "mars-hf\[plot\]"'):
        plot_loss(runs, path)


def test_loss_against_the_learning_rate(tmp_path):
    points = {"adamw": [(6e-3, 1.9), (1e-3, 2.1), (3e-3, 1.8)], "mars-m": [(3e-3, 1.7), (6e-3, 1.6), (1e-1, math.inf)]}
    text = plot_learning_rates(points, tmp_path / "new" / "lr.svg").read_text()
    assert {"adamw", "mars-m", "learning rate", "loss (nats per token)"} <= set(shown(text))
    curves = lines(text)
    assert len(curves) == 2
    assert [len(re.findall("[ML] ", curve)) for curve in curves] == [3, 2], "a run that diverged has no point"
    across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", curves[0])]
    assert across == sorted(across), "from the smallest learning rate to the largest"
    # Logarithmic: 1e-3 to 3e-3 is longer than 3e-3 to 6e-3.
    assert (across[1] - across[0]) / (across[2] - across[1]) == pytest.approx(math.log(3) / math.log(2), rel=1e-3)
    assert len({re.search("stroke-dasharray[^;]*|$", curve).group() for curve in curves}) == 2


def test_the_legend_explains_thin_lines_only_where_there_are_some(tmp_path):
    rows = history(40)
    assert "thin: training, markers: evaluation" in shown(svg({"run": rows}, tmp_path))
    evaluations = [row for row in rows if "eval_loss" in row]
    assert "thin: training, markers: evaluation" not in shown(svg({"run": evaluations}, tmp_path))


def test_errors_of_the_learning_rate_figure(tmp_path):
    with pytest.raises(ValueError, match="runs is empty"):
        plot_learning_rates({}, tmp_path / "lr.png")
    with pytest.raises(ValueError, match=r"lr.xyz' must end in one of .*\.png"):
        plot_learning_rates({"a": [(1e-3, 2.0)]}, tmp_path / "lr.xyz")
