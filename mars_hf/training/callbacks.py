"""What MARSTrainer logs besides what the Trainer does."""

from typing import Any

from transformers import TrainerCallback

from mars_hf.optim import MARS
from mars_hf.optim.metrics import VarianceReduction
from mars_hf.optim.rules import state_names


class VarianceMetrics(TrainerCallback):
    """Measures the variance reduction in every `logging_steps`-th step: `--mars_metrics`, see `VarianceReduction.read`.

    Args:
        optimizer: whose steps are measured.

    Raises:
        ValueError: no param group keeps a reference gradient.
    """

    def __init__(self, optimizer: MARS) -> None:
        if not any("last_grad" in state_names(group) for group in optimizer.param_groups):
            rules = sorted({group["rule"] for group in optimizer.param_groups})
            raise ValueError(f"mars_metrics=True has nothing to measure, {rules} keep no reference gradient: drop it")
        self.optimizer = optimizer
        self.metrics = optimizer.metrics = VarianceReduction()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decides about the coming step, which DeepSpeed takes before any other callback of the Trainer."""
        step = state.global_step + 1
        self.metrics.measures = step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)

    def read(self) -> dict[str, float]:
        """The metrics of the steps that were measured since the last call, under the names that are logged."""
        return {f"mars/{name}": value for name, value in self.metrics.read().items()}
