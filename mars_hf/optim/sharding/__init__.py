"""What a rule may ask about a tensor that may be a shard, answered for each engine."""

from typing import Any

from mars_hf.optim.sharding.base import Round, Sharding, divide, sum_over_ranks, whole_norms
from mars_hf.optim.sharding.groups import GroupTensors, layouts
from mars_hf.optim.sharding.local import LocalTensors
from mars_hf.optim.sharding.memory import gradient_like, is_dense, same_layout

__all__ = [
    "GroupTensors",
    "LocalTensors",
    "Round",
    "Sharding",
    "divide",
    "gradient_like",
    "is_dense",
    "layouts",
    "same_layout",
    "sum_over_ranks",
    "whole_norms",
    "whole_shape",
]


def whole_shape(p: Any) -> tuple[int, ...]:
    """The shape of a parameter, also where DeepSpeed has taken its elements away (ZeRO-3, zero.Init)."""
    return tuple(getattr(p, "ds_shape", p.shape))
