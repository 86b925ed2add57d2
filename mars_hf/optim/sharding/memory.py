"""The memory of tensors: its order, and gradients brought into that of their parameter."""

from typing import Any

import torch
from torch import Tensor


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
