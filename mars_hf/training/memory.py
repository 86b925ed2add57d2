"""The memory of a run before it starts: what each process holds of weights, gradients and optimizer state."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mars_hf.optim.hyper import Hyper, one_of
from mars_hf.optim.rules import state_names

# Launch files of accelerate_configs; ddp stands for ddp_cpu and multi_node too.
ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")

# Elements that ZeRO-3 steps at once, and keeps float32 gradients of: DeepSpeed's default for sub_group_size.
SUB_GROUP = 10**9


class Memory(NamedTuple):
    """Bytes of one process, of the one that holds most.

    `parameters` are the weights, under ZeRO with their float32 copy, `gradients` with DDP's buckets, `states` those of
    the optimizer, by rule. `host` is how much of all that is in the machine's memory (offload), not on the GPU.
    """

    parameters: int
    gradients: int
    states: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + sum(self.states.values())


def run_memory(
    model: nn.Module, param_groups: Iterable[dict[str, Any]], *, engine: str, dtype: torch.dtype, processes: int
) -> Memory:
    """Counts the most that a process holds between a backward pass and the next forward pass, steps included.

    Not counted: activations, the half-precision copies of weights that autocast makes for a forward pass, the gathered
    weights of the layer that FSDP2 or ZeRO-3 is at, communication buffers, and the temporaries of a step.

    Args:
        model: the model to train, on any device, meta too; only read.
        param_groups: those of its `MARS` optimizer.
        engine: one of `ENGINES`.
        dtype: of the computation, float32, bfloat16 or float16. Only ZeRO keeps its weights and gradients in it.
        processes: W, the number of processes; single takes 1.

    Raises:
        ValueError: an unknown engine, or not one process for single.
    """
    one_of("engine", engine, ENGINES)
    if processes < 1 or (engine == "single" and processes != 1):
        raise ValueError(f"processes={processes}: engine={engine!r} takes {'1' if engine == 'single' else '1 or more'}")
    groups, everything = list(param_groups), list(model.parameters())
    trained = [p for group in groups for p in group["params"]]
    parts = 1 if engine in ("single", "ddp") else processes
    states = _states(groups, engine, parts)

    def total(params: Sequence[Tensor], itemsize: int | None = None, parts: int = parts) -> int:
        """Bytes of one of `parts` shares of tensors; without `itemsize` in their own dtype."""
        return sum(_share(p, engine, parts) * (itemsize or p.itemsize) for p in params)

    if engine in ("single", "ddp", "fsdp2"):
        return Memory(total(everything), total(trained) * (2 if engine == "ddp" else 1), states)
    size = None if dtype == torch.float32 else dtype.itemsize
    master = float32_gradients = total(trained, 4)
    reduced = total(trained, size)
    if engine in ("zero1", "zero2"):
        # A step has its share twice, reduced and in float32. Between micro-batches ZeRO-1 has whole gradients.
        whole = total(trained, size, parts=1) if engine == "zero1" else 0
        return Memory(total(everything, size, parts=1) + master, max(whole, reduced + float32_gradients), states)
    float32_gradients = min(float32_gradients, 4 * SUB_GROUP)
    host = master + float32_gradients + sum(states.values()) if engine == "zero3_offload" else 0
    return Memory(total(everything, size) + master, reduced + float32_gradients, states, host)


def _share(p: Tensor, engine: str, parts: int) -> int:
    """Elements of the largest of `parts` shares. FSDP2 divides the first dimension, ZeRO all elements."""
    if engine == "fsdp2" and p.dim():
        return ceil(p.shape[0] / parts) * (p.numel() // max(1, p.shape[0]))
    return ceil(p.numel() / parts)


def _states(groups: list[dict[str, Any]], engine: str, parts: int) -> dict[str, int]:
    """Bytes of the optimizer's state by rule."""
    # Exact mode keeps the previous parameters too, those of every rule.
    exact = any(not group["is_approx"] for group in groups)
    states = Counter[str]()
    for group in groups:
        names = [name for name in state_names(Hyper.of(group)) if name != "step"] + ["previous_param"] * exact
        for p in group["params"]:
            dtype = torch.float32 if engine.startswith("zero") else p.dtype
            dtypes = {"last_grad": group["last_grad_dtype"] or dtype}
            itemsize = sum(dtypes.get(name, dtype).itemsize for name in names)
            states[group["rule"]] += _share(p, engine, parts) * itemsize + 4 * ("step" in state_names(Hyper.of(group)))
    return dict(states)
