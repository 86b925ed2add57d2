"""What a param group holds: one typed, checked record, and the checks of values that a user passes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WITHOUT_LAST_GRAD = ("mars-lion", "mars-shampoo", "mars-m")  # whose update has an exact form that stores no h


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


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of a param group, under the names that they have there; `MARS` says what each one means.

    Raises:
        ValueError: a value out of range, or a combination that no rule serves.
    """

    rule: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool
    gamma: float
    is_approx: bool
    optimize_1d: bool
    clip_c: float | None
    memory_efficient: bool
    last_grad_dtype: torch.dtype | None
    ns_steps: int
    ns_dtype: torch.dtype
    nesterov: bool
    transposed: bool
    stacked: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Hyper":
        """That of a param group."""
        return cls(**{field.name: group[field.name] for field in fields(cls)})

    @property
    def alpha(self) -> float:
        """gamma beta1 / (1 - beta1)."""
        return self.gamma * self.betas[0] / (1 - self.betas[0])

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "gamma"):
            non_negative(name, getattr(self, name))
        two_betas("betas", self.betas)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be True or False")
        if self.clip_c is not None:
            non_negative("clip_c", self.clip_c)
            if self.clip_c == 0:
                raise ValueError(f"clip_c={self.clip_c} would clip everything away: pass a number > 0, or None")
        if isinstance(self.ns_steps, bool) or not isinstance(self.ns_steps, int) or self.ns_steps < 1:
            raise ValueError(f"ns_steps={self.ns_steps!r} must be an integer >= 1")
        for name, allowed in (("ns_dtype", DTYPES), ("last_grad_dtype", (None, *DTYPES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(str, allowed))}")
        if self.memory_efficient:
            self._check_memory_efficient()

    def _check_memory_efficient(self) -> None:
        """Raises ValueError where the memory-efficient form would not be exact."""
        if self.rule not in (*WITHOUT_LAST_GRAD, "adamw"):
            raise ValueError(
                f"memory_efficient=True is not exact for {self.rule!r}: choose from {', '.join(WITHOUT_LAST_GRAD)}"
            )
        if not self.is_approx:
            raise ValueError("memory_efficient=True needs is_approx=True: exact mode must keep a reference gradient")
        if self.clip_c is not None:
            raise ValueError(
                f"memory_efficient=True cannot clip c, got clip_c={self.clip_c!r}: pass clip_c=None (--mars_clip_c 0)"
            )
        if self.last_grad_dtype is not None:
            raise ValueError(
                f"memory_efficient=True keeps no last_grad, got last_grad_dtype={self.last_grad_dtype}: drop one"
            )
