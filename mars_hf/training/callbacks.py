"""What MARSTrainer logs besides what the Trainer does."""

import sys
import time
from typing import Any

import torch
from transformers import TrainerCallback

from mars_hf.optim import MARS
from mars_hf.optim.hyper import Hyper
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
        if not any("last_grad" in state_names(Hyper.of(group)) for group in optimizer.param_groups):
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


class TrainingCost(TrainerCallback):
    """Measures what a run costs: seconds, memory, state of the optimizer.

    Every row of the log history gets "elapsed_seconds", the seconds spent in optimizer steps so far: evaluation,
    checkpoints and the start are left out. A resumed run counts on from the row before.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sizes: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to count, or counts on from the checkpoint."""
        self.seconds = max((row.get("elapsed_seconds", 0.0) for row in state.log_history), default=0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock, before the forward pass of the first micro-batch."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock, after the update."""
        self.seconds += time.perf_counter() - self._started

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the seconds to the row just logged."""
        state.log_history[-1]["elapsed_seconds"] = self.seconds

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Measures the memory, while the optimizer is there."""
        # The wrapper of some engines shows no state.
        entries = getattr(optimizer, "state", {}).values()
        tensors = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
        parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        self.sizes = {
            "optimizer_state_bytes": sum(part.numel() * part.element_size() for part in parts),
            "peak_memory_bytes": _peak_memory(args.device),
        }

    def report(self) -> dict[str, float]:
        """Seconds in optimizer steps, and in bytes of this process the optimizer's state and the peak memory.

        The peak is that of CUDA's allocator, or elsewhere of the whole process in main memory, libraries included.
        """
        return {"training_seconds": self.seconds, **self.sizes}


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # which Windows lacks

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
