"""The downstream table of the MARS paper: its tasks, which score each column shows, and its rows."""

from collections.abc import Mapping
from typing import Any

from mars_hf.evaluation.table import markdown

# Column, lm-eval task, metric. The paper does not say which metric its columns are. OpenAI's GPT-2 settles it, of which
# zero-shot scores by this harness are public. acc / acc_norm of 124M, beside the paper's row: ARC-E 43.81 / 39.48
# (39.48), ARC-C 19.03 / 22.70 (22.70), HellaSwag 28.92 / 31.14 (31.14), PIQA 62.89 / 62.51 (62.51), SciQ 75.0 / 64.4
# (64.40); OpenBookQA has acc 22.4 for XL, where the paper has 32.00. BoolQ 48.72 and WinoGrande 51.62 are equal, and
# like MMLU have acc alone. So a column is acc_norm wherever its task has that.
COLUMNS = (
    ("ARC-E", "arc_easy", "acc_norm"),
    ("ARC-C", "arc_challenge", "acc_norm"),
    ("BoolQ", "boolq", "acc"),
    ("HellaSwag", "hellaswag", "acc_norm"),
    ("OBQA", "openbookqa", "acc_norm"),
    ("PIQA", "piqa", "acc_norm"),
    ("WinoGrande", "winogrande", "acc"),
    ("MMLU", "mmlu", "acc"),
    ("SciQ", "sciq", "acc_norm"),
)
TASKS = tuple(task for _, task, _ in COLUMNS)

# Per cent, zero-shot, after 50B tokens of FineWeb-Edu; OpenAI's models had other data. arXiv 2411.10438. The averages
# of these rounded figures are the paper's, but for XL AdamW, 55.43 there.
PUBLISHED = {
    "GPT-2 small, OpenAI": (39.48, 22.70, 48.72, 31.14, 27.20, 62.51, 51.62, 22.92, 64.40),
    "GPT-2 small, AdamW": (51.43, 26.54, 55.78, 36.26, 30.60, 64.53, 50.36, 24.49, 71.50),
    "GPT-2 small, MARS-AdamW": (52.23, 27.39, 55.84, 36.91, 32.20, 64.80, 49.96, 22.95, 71.10),
    "GPT-2 XL, OpenAI": (51.05, 28.50, 61.77, 50.89, 32.00, 70.51, 58.33, 25.24, 76.00),
    "GPT-2 XL, AdamW": (68.22, 38.40, 61.13, 53.93, 39.00, 72.69, 54.78, 25.47, 85.30),
    "GPT-2 XL, MARS-AdamW": (66.54, 39.85, 63.82, 56.52, 41.20, 73.34, 56.59, 23.86, 86.00),
}


def format_paper_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes results beside the published rows, as Markdown.

    Args:
        results: Name of a checkpoint to what `evaluate` returned for it; the tasks are some of `TASKS`, the same for
            all checkpoints.

    Returns:
        A table in per cent with a row for each checkpoint and each published model, the average over its columns, and
        the number of items; standard errors follow ±. Below it the source of each task's items.

    Raises:
        ValueError: There are no results, or two have different tasks.
    """
    tasks = {tuple(sorted(result["tasks"])) for result in results.values()}
    if len(tasks) != 1:
        raise ValueError(f"results: {sorted(tasks)} are not one set of tasks; score the same ones for every checkpoint")
    columns = [column for column in enumerate(COLUMNS) if column[1][1] in next(iter(tasks))]
    header = ["Model", *(f"{title} {metric}" for _, (title, _, metric) in columns), "Average"]
    rows = []
    for name, result in results.items():
        found = [result["tasks"][task] for _, (_, task, _) in columns]
        metrics = [metric for _, (_, _, metric) in columns]
        scores = [100 * part[metric] for part, metric in zip(found, metrics)]
        errors = [100 * (part[f"{metric}_stderr"] or 0.0) for part, metric in zip(found, metrics)]
        error = sum(error**2 for error in errors) ** 0.5 / len(errors)
        cells = zip([*scores, sum(scores) / len(scores)], [*errors, error])
        rows.append([name, *(f"{score:.2f} ± {error:.2f}" for score, error in cells)])
        items = [part["items"] for part in found]
        rows.append(["  items", *(f"{count:,}" for count in items), f"{sum(items):,}"])
    for name, published in PUBLISHED.items():
        scores = [published[index] for index, _ in columns]
        rows.append([f"{name} (paper)", *(f"{score:.2f}" for score in [*scores, sum(scores) / len(scores)])])
    sources = [f"- {task}: {part['data']}" for task, part in next(iter(results.values()))["tasks"].items()]
    return "\n".join([*markdown([header, *rows]), "", *sources])
