"""The downstream table of the paper."""

import re

import pytest

from mars_hf.evaluation.paper import COLUMNS, PUBLISHED, TASKS, format_paper_table

# The averages the paper prints, in the order of its rows; that of XL AdamW is of figures with more digits.
AVERAGES = (41.19, 45.72, 45.93, 50.48, 55.43, 56.41)


def result(tasks, score=0.5, stderr=0.03):
    scores = {"acc": score, "acc_stderr": stderr, "acc_norm": score + 0.1, "acc_norm_stderr": stderr}
    return {"tasks": {task: {**scores, "items": 1000, "data": "hub: all 1,000 test items"} for task in tasks}}


def test_the_published_rows_have_the_published_averages():
    for (name, row), average in zip(PUBLISHED.items(), AVERAGES):
        assert sum(row) / len(row) == pytest.approx(average, abs=0.0056), name


def test_a_column_is_acc_norm_where_the_task_has_it():
    """What lm-eval published for OpenAI's GPT-2 124M, acc and acc_norm, decides between the two."""
    harness = {
        "arc_easy": (43.81, 39.48),
        "arc_challenge": (19.03, 22.70),
        "boolq": (48.72, None),
        "hellaswag": (28.92, 31.14),
        "piqa": (62.89, 62.51),
        "winogrande": (51.62, None),
        "sciq": (75.0, 64.4),
    }
    paper = dict(zip(TASKS, PUBLISHED["GPT-2 small, OpenAI"]))
    for _, task, metric in COLUMNS:
        if task in harness:
            acc, acc_norm = harness[task]
            assert paper[task] == pytest.approx(acc_norm if metric == "acc_norm" else acc, abs=0.005), task


def test_the_table_has_scores_errors_average_items_and_sources():
    table = format_paper_table({"mine": result(TASKS), "other": result(TASKS, score=0.2)})
    lines = table.split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][1:] == [f"{title} {metric}" for title, _, metric in COLUMNS] + ["Average"]
    assert rows[2][:4] == ["mine", "60.00 ± 3.00", "60.00 ± 3.00", "50.00 ± 3.00"], "acc_norm, acc_norm, acc"
    assert rows[2][-1] == "56.67 ± 1.00", "(6 x 60 + 3 x 50) / 9 ± 3 x sqrt(9) / 9"
    assert rows[3] == ["items", *["1,000"] * 9, "9,000"]
    assert rows[4][0] == "other" and rows[-1][0] == "GPT-2 XL, MARS-AdamW (paper)"
    assert rows[-1][4] == "56.52", "HellaSwag of GPT-2 XL"
    assert len({len(line) for line in lines if line.startswith("|")}) == 1, "aligned"
    assert [re.split(r"[-: ]+", line)[1] for line in lines if line.startswith("-")] == list(TASKS)


def test_some_of_the_tasks_make_a_narrower_table_and_different_ones_none():
    table = format_paper_table({"mine": result(["boolq", "sciq"])})
    assert "BoolQ acc" in table and "SciQ acc_norm" in table and "PIQA" not in table
    lines = format_paper_table({"a": result(["sciq", "boolq"]), "b": result(["boolq", "sciq"])}).split("\n")
    assert lines[2].split("|")[2:] == lines[4].split("|")[2:], "the order of the tasks"
    with pytest.raises(ValueError, match="not one set of tasks"):
        format_paper_table({"a": result(["boolq"]), "b": result(["sciq"])})
