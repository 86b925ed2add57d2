"""Checks of the values a user passes: one line that names the argument, the value seen and the way out."""

import math
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import torch


def one_of(name: str, value: Any, names: Collection[str]) -> None:
    """Raises ValueError, with the nearest valid name, unless `value` is one of `names`."""
    if value not in names:
        near = get_close_matches(str(value), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{name}={value!r} is unknown: {hint}choose from {', '.join(names)}")


def check_hyperparameters(group: dict[str, Any]) -> None:
    """Raises ValueError for a param group with a value out of range or a combination that no rule serves."""
    for name in ("lr", "eps", "weight_decay", "gamma"):
        value = group[name]
        if isinstance(value, torch.Tensor) or not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} must be a finite number >= 0, not a tensor")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")
    clip_c = group["clip_c"]
    if clip_c is not None and (isinstance(clip_c, bool) or not 0 < clip_c < math.inf):
        raise ValueError(f"clip_c={clip_c!r} must be a number > 0, or None for no clip")
    if not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
        raise ValueError(f"ns_steps={group['ns_steps']!r} must be an integer >= 1")
    for name, optional in (("ns_dtype", False), ("last_grad_dtype", True)):
        dtype = group[name]
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point) and not (optional and dtype is None):
            raise ValueError(f"{name}={dtype!r} must be a floating-point torch.dtype" + " or None" * optional)
    if group["memory_efficient"]:
        check_memory_efficient(group)


def check_memory_efficient(group: dict[str, Any]) -> None:
    """Raises ValueError where the memory-efficient form would not be exact."""
    served = ("mars-lion", "mars-shampoo", "mars-m")
    if group["rule"] not in (*served, "adamw"):
        raise ValueError(f"memory_efficient=True is not exact for {group['rule']!r}: choose from {', '.join(served)}")
    if not group["is_approx"]:
        raise ValueError("memory_efficient=True needs is_approx=True: exact mode must keep a reference gradient")
    if group["clip_c"] is not None:
        raise ValueError(f"memory_efficient=True cannot clip c, got clip_c={group['clip_c']!r}: pass clip_c=None")
    if group["last_grad_dtype"] is not None:
        raise ValueError(
            f"memory_efficient=True keeps no last_grad, got last_grad_dtype={group['last_grad_dtype']}: drop one"
        )
