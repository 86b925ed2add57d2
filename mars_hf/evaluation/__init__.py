"""Scores of language models: multiple-choice tasks through lm-eval, and metrics for the `evaluate` library.

Importing this package is cheap; lm-eval is imported by the first call of `evaluate`.
"""

from mars_hf.evaluation.harness import evaluate
from mars_hf.evaluation.metrics import load_metric
from mars_hf.evaluation.table import format_table

__all__ = ["evaluate", "format_table", "load_metric"]
