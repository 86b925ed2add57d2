"""The result of evaluate() for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


def format_table(result: Mapping[str, Any]) -> str:
    """Writes the scores as a Markdown table.

    Args:
        result: What `evaluate` returned.

    Returns:
        A header and a line for each score: task, metric, score ± standard error, items, and the data it stands on. The
        columns are aligned, and there is no newline at the end.
    """
    rows = [("Task", "Metric", "Score", "Items", "Data")]
    for name, task in result["tasks"].items():
        label = f"{name} ({task['num_fewshot']}-shot)" if task["num_fewshot"] else name
        for metric in (key.removesuffix("_stderr") for key in task if key.endswith("_stderr")):
            rows.append(
                (label, metric, _score(task[metric], task[f"{metric}_stderr"]), f"{task['items']:,}", task["data"])
            )
    return "\n".join(markdown(rows))


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines of a Markdown table, the first row being its header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return lines


def _score(score: float | None, stderr: float | None) -> str:
    if score is None:
        return "-"
    return f"{score:.4f}" if stderr is None else f"{score:.4f} ± {stderr:.4f}"
