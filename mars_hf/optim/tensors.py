"""Questions about single parameters: their name, their memory, whether a rule can update them."""

from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.rules import MATRIX_RULES
from mars_hf.optim.sharding import whole_shape


def check_parameter(p: Tensor, group: dict[str, Any], i: int) -> None:
    """Raises ValueError for a parameter that the rule of its group cannot update."""
    if p.is_complex():
        raise ValueError(f"{name_of(p, group, i)} is complex: pass torch.view_as_real of it instead")
    if not is_dense(p):
        raise ValueError(f"{name_of(p, group, i)} has gaps in memory (strides {p.stride()}): pass a contiguous tensor")
    if getattr(p, "_fsdp_flattened", False) and group["rule"] != "adamw":
        raise ValueError(
            f"{name_of(p, group, i)} was flattened by FSDP1, where the rule {group['rule']!r} finds no whole tensor: "
            "train with DDP, FSDP2 or DeepSpeed ZeRO"
        )
    vectors_allowed = group["rule"] == "adamw" or (group["optimize_1d"] and group["rule"] not in MATRIX_RULES)
    if len(whole_shape(p)) < 2 and not vectors_allowed:
        raise ValueError(
            f"{name_of(p, group, i)} is no matrix, but its rule is {group['rule']!r}: give vectors the rule "
            "'adamw'; if an engine flattened it (FSDP1), train with DDP, FSDP2 or DeepSpeed ZeRO"
        )
    if group["rule"] in MATRIX_RULES and group["stacked"] and len(whole_shape(p)) != 3:
        raise ValueError(
            f"{name_of(p, group, i)} is no stack of matrices, which has three dimensions: give it a group with "
            "stacked=False"
        )


def tensor_of(p: Any) -> Tensor:
    """The tensor of a parameter or of a (name, parameter) pair."""
    return p[1] if isinstance(p, tuple) else p


def gradient_like(p: Tensor) -> Tensor:
    """p.grad in the memory layout of p, on each rank: torch's fused kernels walk both by address."""
    g: Any = p.grad
    placements = getattr(p, "placements", None)
    if placements != getattr(g, "placements", None):
        # Of a DTensor that no engine manages; parts of a sum over the ranks, say.
        g = g.redistribute(placements=placements)
    return g if same_layout(g, p) else torch.empty_like(p).copy_(g)


def same_layout(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def is_dense(p: Tensor) -> bool:
    """Whether the elements of p fill a stretch of memory, in whatever order of dimensions."""
    return p.numel() == 0 or sum((n - 1) * stride for n, stride in zip(p.shape, p.stride())) == p.numel() - 1


def name_of(p: Tensor, group: dict[str, Any], i: int) -> str:
    given = group["params"][i]
    name = given[0] if isinstance(given, tuple) else group.get("param_names", {i: i})[i]
    return f"parameter {name!r} (shape {whole_shape(p)})"


def name_in(group: dict[str, Any], p: Tensor) -> str:
    return name_of(p, group, place_of(p, group))


def place_of(p: Tensor, group: dict[str, Any]) -> int:
    return next(i for i, q in enumerate(group["params"]) if tensor_of(q) is p)
