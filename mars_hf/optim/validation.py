"""Checks of the values a user passes: one line that names the argument, the value seen and the way out."""

import math
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def one_of(name: str, value: Any, names: Collection[str], listed: str | None = None) -> None:
    """Raises ValueError, with the nearest valid name, unless `value` is one of `names`; `listed` says them in short."""
    if value not in names:
        near = get_close_matches(str(value), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{name}={value!r} is unknown: {hint}choose from {listed or ', '.join(names)}")


def non_negative(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number >= 0 (a Python float, no tensor)")


def two_betas(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is two numbers in [0, 1)."""
    pair = value if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in pair):
        raise ValueError(f"{name}={value!r} must be two numbers in [0, 1)")


def check_hyperparameters(group: dict[str, Any]) -> None:
    """Raises ValueError for a param group with a value out of range or a combination that no rule serves."""
    for name in ("lr", "eps", "weight_decay", "gamma"):
        non_negative(name, group[name])
    two_betas("betas", group["betas"])
    for name in ("amsgrad", "is_approx", "optimize_1d", "memory_efficient", "nesterov", "transposed", "stacked"):
        if not isinstance(group[name], bool):
            raise ValueError(f"{name}={group[name]!r} must be True or False")
    if group["clip_c"] is not None:
        non_negative("clip_c", group["clip_c"])
        if group["clip_c"] == 0:
            raise ValueError(f"clip_c={group['clip_c']} would clip everything away: pass a number > 0, or None")
    if isinstance(group["ns_steps"], bool) or not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
        raise ValueError(f"ns_steps={group['ns_steps']!r} must be an integer >= 1")
    for name, allowed in (("ns_dtype", DTYPES), ("last_grad_dtype", (None, *DTYPES))):
        if group[name] not in allowed:
            raise ValueError(f"{name}={group[name]!r} is not one of {', '.join(map(str, allowed))}")
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
        raise ValueError(
            f"memory_efficient=True cannot clip c, got clip_c={group['clip_c']!r}: pass clip_c=None (--mars_clip_c 0)"
        )
    if group["last_grad_dtype"] is not None:
        raise ValueError(
            f"memory_efficient=True keeps no last_grad, got last_grad_dtype={group['last_grad_dtype']}: drop one"
        )
