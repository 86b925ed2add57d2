"""Scores of language models: multiple-choice tasks through lm-eval, and metrics for the `evaluate` library.

Importing this package is cheap: transformers comes with `LMEvalCallback`, lm-eval with the first evaluation.
"""

from typing import TYPE_CHECKING, Any

from mars_hf.evaluation.harness import evaluate
from mars_hf.evaluation.metrics import load_metric
from mars_hf.evaluation.table import format_table

if TYPE_CHECKING:
    from mars_hf.evaluation.callback import LMEvalCallback

__all__ = ["LMEvalCallback", "evaluate", "format_table", "load_metric"]


def __getattr__(name: str) -> Any:
    if name != "LMEvalCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mars_hf.evaluation.callback import LMEvalCallback

    return LMEvalCallback
