"""The mathematics: one function for each update rule, over lists of tensors, and the table of rules.

Notation: p parameter, g gradient (after the global clip), h reference gradient (`last_grad`), m `exp_avg`,
v `exp_avg_sq`, wd weight decay, always decoupled; the p on the right of an update is the value before the step.

    alpha = gamma beta1 / (1 - beta1)
    c     = g + alpha (g - h)                     corrected gradient; MARS paper, arXiv 2411.10438
    c     = c / max(1, ||c||_2 / clip_c)          one norm for each whole tensor

The same functions run eagerly, with numbers, and compiled (compiled.py), with 0-dim tensors in place of the numbers. A
rule modifies params and state in place and only reads the gradients. One that orthogonalises returns a list of the M
whose NS5(M) is the update: momenta themselves or new tensors, only to be read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from mars_hf.optim.hyper import Hyper

Number = Any  # a float, or a 0-dim tensor


class Tensors(NamedTuple):
    """Lists over the same tensors, or parts of them, which share device and dtype; empty where a rule has none."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    max_exp_avg_sq: list[Tensor]
    last_grad: list[Tensor]
    step: list[Tensor]  # counts this step already
    c: list[Tensor]  # before its clip, where it was written over h when its norm was taken
    clip: list[Number]  # what c is multiplied by

    @classmethod
    def of(cls, **lists: list[Tensor]) -> "Tensors":
        """Those that are given; the others are empty."""
        return cls(*(lists.get(name, []) for name in cls._fields))


class Numbers(NamedTuple):
    """What a param group's hyperparameters come to in a step, worked out in float64."""

    is_approx: bool
    nesterov: bool
    scale: Number  # of the gradients, 1 / grad_scale; None: 1
    lr: Number
    beta1: Number
    beta2: Number
    eps: Number
    weight_decay: Number
    decay: Number  # 1 - lr wd
    gamma: Number
    alpha: Number
    one_minus_beta1: Number  # 1 - beta1
    one_minus_beta2: Number  # 1 - beta2
    lean_weight: Number  # (1 - beta1) (1 - gamma)
    step_size: Number = None  # lr / (1 - beta1^t); this and the next are worked out for compiled functions alone
    v_correction: Number = None  # 1 / (1 - beta2^t), under the root

    @classmethod
    def of(cls, hyper: Hyper, grad_scale: Number, device: torch.device) -> "Numbers":
        """Those of a param group with tensors on a device, after gradients came multiplied by `grad_scale` or None."""
        beta1, beta2 = hyper.betas
        scale: Number = None
        if isinstance(grad_scale, Tensor) and device.type != "cpu":
            scale = grad_scale.to(device).reciprocal().reshape(())  # reading it would make the host wait
        elif grad_scale is not None and float(grad_scale) != 1:
            scale = 1 / float(grad_scale) if grad_scale else float("inf")
        return cls(
            is_approx=hyper.is_approx,
            nesterov=hyper.nesterov,
            scale=scale,
            lr=float(hyper.lr),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(hyper.eps),
            weight_decay=float(hyper.weight_decay),
            decay=1 - hyper.lr * hyper.weight_decay,
            gamma=float(hyper.gamma),
            alpha=float(hyper.alpha),
            one_minus_beta1=1 - beta1,
            one_minus_beta2=1 - beta2,
            lean_weight=(1 - beta1) * (1 - hyper.gamma),
        )


def mars_adamw(x: Tensors, n: Numbers) -> None:
    """m = beta1 m + (1 - beta1) c;  v = beta2 v + (1 - beta2) c^2;  AdamW with m and v.

    v takes the clipped c, as the authors' code does; their README prints g^2.
    """
    g = gradients(x, n)
    adamw_(x, clipped(corrected(x, g, n), x), n)
    renew_(x, g, n)


def mars_lion(x: Tensors, n: Numbers) -> None:
    """m = beta1 m + (1 - beta1) c;  p -= lr (wd p + sign(m))."""
    m = mars_momentum_(x, n)
    descend_(x.params, list(torch._foreach_sign(m)), n)


def mars_shampoo(x: Tensors, n: Numbers) -> list[Tensor]:
    """m = beta1 m + (1 - beta1) c;  p -= lr (wd p + max(1, rows / cols)^0.5 NS5(m / (1 - beta1)))."""
    return mars_momentum_(x, n)


def mars_m(x: Tensors, n: Numbers) -> list[Tensor]:
    """m = beta1 m + (1 - beta1) c;  p -= lr (wd p + 0.2 sqrt(max(rows, cols)) NS5(m)).

    Source: arXiv 2510.21800.
    """
    return mars_momentum_(x, n)


def adamw(x: Tensors, n: Numbers) -> None:
    """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  AdamW with m and v."""
    adamw_(x, gradients(x, n), n)


def muon(x: Tensors, n: Numbers) -> list[Tensor]:
    """b = beta1 b + g;  p -= lr (wd p + max(1, rows / cols)^0.5 NS5(g + beta1 b)); without nesterov NS5(b)."""
    g = gradients(x, n)
    torch._foreach_mul_(x.exp_avg, n.beta1)
    torch._foreach_add_(x.exp_avg, g)
    return list(torch._foreach_add(g, torch._foreach_mul(x.exp_avg, n.beta1))) if n.nesterov else x.exp_avg


def moonlight(x: Tensors, n: Numbers) -> list[Tensor]:
    """b as in muon;  p -= lr (wd p + 0.2 sqrt(max(rows, cols)) NS5(g + beta1 b))."""
    return muon(x, n)


def gradients(x: Tensors, n: Numbers) -> list[Tensor]:
    """g: what is in p.grad, by the scale of this step."""
    return x.grads if n.scale is None else list(torch._foreach_mul(x.grads, n.scale))


def corrected(x: Tensors, g: list[Tensor], n: Numbers) -> list[Tensor]:
    """c = g + alpha (g - h) = lerp(h, g, 1 + alpha), before the clip; eagerly over h, where that has the dtype of g."""
    if x.c:
        return x.c
    h = [last_grad.to(grad.dtype) for last_grad, grad in zip(x.last_grad, g)]
    if torch.compiler.is_compiling():  # _foreach_lerp would keep the first weight that it sees (float64, torch 2.13)
        return list(torch._foreach_add(g, torch._foreach_mul(torch._foreach_sub(g, h), n.alpha)))
    torch._foreach_lerp_(h, g, 1 + n.alpha)
    return h


def clipped(c: list[Tensor], x: Tensors) -> list[Tensor]:
    """c by the factors of its clip, in place."""
    if x.clip and isinstance(x.clip[0], Tensor):
        torch._foreach_mul_(c, x.clip)
        return c
    for tensor, factor in zip(c, x.clip):
        if factor != 1.0:  # saves a pass over the tensor
            tensor.mul_(factor)
    return c


def mars_momentum_(x: Tensors, n: Numbers) -> list[Tensor]:
    """m = beta1 m + (1 - beta1) c, and h is g from now on.

    Without h, where nothing is clipped: k = m - gamma g obeys k = beta1 k + (1 - beta1) (1 - gamma) g, so `exp_avg`
    holds k, and m = k + gamma g (arXiv 2510.21800).
    """
    g = gradients(x, n)
    if not x.last_grad:
        torch._foreach_mul_(x.exp_avg, n.beta1)
        torch._foreach_add_(x.exp_avg, torch._foreach_mul(g, n.lean_weight))
        return list(torch._foreach_add(x.exp_avg, torch._foreach_mul(g, n.gamma)))
    torch._foreach_lerp_(x.exp_avg, clipped(corrected(x, g, n), x), n.one_minus_beta1)
    renew_(x, g, n)
    return x.exp_avg


def renew_(x: Tensors, g: list[Tensor], n: Numbers) -> None:
    """h = g for the next step; in exact mode the caller sets h.

    A copy into the optimizer's own memory: engines write the next gradient over the memory of this one.
    """
    if n.is_approx:
        torch._foreach_copy_(x.last_grad, g)


def descend_(params: list[Tensor], updates: list[Tensor], n: Numbers) -> None:
    """p -= lr (wd p + u)."""
    if torch.compiler.is_compiling():  # where a number is a tensor, which can be neither asked nor be an alpha
        torch._foreach_mul_(params, n.decay)
        torch._foreach_sub_(params, torch._foreach_mul(updates, n.lr))
        return
    if n.weight_decay != 0:
        torch._foreach_mul_(params, n.decay)
    torch._foreach_add_(params, updates, alpha=-n.lr)


def adamw_(x: Tensors, c: list[Tensor], n: Numbers) -> None:
    """p -= lr (wd p + (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)), m and v from c.

    Written out where a compiler fuses it with the rest of a rule, otherwise by torch's own kernel, fused where the
    device has one. amsgrad puts the running maximum of v in its place.
    """
    if torch.compiler.is_compiling():
        torch._foreach_lerp_(x.exp_avg, c, n.one_minus_beta1)
        torch._foreach_mul_(x.exp_avg_sq, n.beta2)
        torch._foreach_add_(x.exp_avg_sq, torch._foreach_mul(torch._foreach_mul(c, c), n.one_minus_beta2))
        if x.max_exp_avg_sq:
            torch._foreach_maximum_(x.max_exp_avg_sq, x.exp_avg_sq)
        v = torch._foreach_mul(x.max_exp_avg_sq or x.exp_avg_sq, n.v_correction)
        denominators = torch._foreach_add(torch._foreach_sqrt(v), [n.eps] * len(v))
        torch._foreach_mul_(x.params, n.decay)
        torch._foreach_sub_(x.params, torch._foreach_mul(torch._foreach_div(x.exp_avg, denominators), n.step_size))
        return
    tensors = (x.params, c, x.exp_avg, x.exp_avg_sq, x.max_exp_avg_sq)
    numbers = {
        **{"lr": n.lr, "beta1": n.beta1, "beta2": n.beta2, "weight_decay": n.weight_decay},
        **{"eps": n.eps, "amsgrad": bool(x.max_exp_avg_sq), "maximize": False},
    }
    if x.params[0].device.type in _get_fused_kernels_supported_devices():
        torch._fused_adamw_(*tensors, x.step, **numbers, grad_scale=None, found_inf=None)
    else:
        # This one counts the step by itself.
        torch_adamw(*tensors, list(torch._foreach_sub(x.step, 1)), foreach=True, **numbers)


def squared_norms_of_c(x: Tensors, n: Numbers) -> list[Tensor]:
    """||c||_2^2 of each tensor before the clip, 0-dim, in float32 at least."""
    return squared_norms(corrected(x, gradients(x, n), n))


def squared_norms(tensors: list[Tensor]) -> list[Tensor]:
    """||t||_2^2 of each tensor, 0-dim, in float32 at least."""
    first = tensors[0]
    if torch.compiler.is_compiling():
        return [(t.float() if t.dtype.itemsize < 4 else t).square().sum() for t in tensors]
    if first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64):
        # Twice as fast as the norm.
        return [torch.dot(t.view(-1), t.view(-1)) if t.is_contiguous() else t.square().sum() for t in tensors]
    # In float16 a norm would overflow at 65,504.
    norms = torch._foreach_norm(tensors, 2, dtype=torch.promote_types(first.dtype, torch.float32))
    return list(torch._foreach_mul(norms, norms))


def spectral_scale(rows: int, cols: int) -> float:
    """max(1, rows / cols)^0.5."""
    return max(1.0, rows / cols) ** 0.5


def rms_scale(rows: int, cols: int) -> float:
    """0.2 sqrt(max(rows, cols)), which gives the update the root mean square of an AdamW update."""
    return 0.2 * max(rows, cols) ** 0.5


class Rule(NamedTuple):
    """What the optimizer needs to know of a rule."""

    update: Callable[[Tensors, Numbers], list[Tensor] | None]
    state: tuple[str, ...]
    scale: Callable[[int, int], float] | None = None  # of NS5, by rows and columns; None: it takes any tensor
    ns_eps: Callable[[Hyper], float] = lambda hyper: 1e-7  # added to the Frobenius norm of M
    embeddings_to_adamw: bool = False  # embeddings and the output head


MOMENTUM, ADAMW = ("exp_avg",), ("step", "exp_avg", "exp_avg_sq")
RULES = {
    "mars-adamw": Rule(mars_adamw, (*ADAMW, "last_grad")),
    "mars-lion": Rule(mars_lion, (*MOMENTUM, "last_grad")),
    # NS5(m / (1 - beta1)) with the optimizer's eps, as in the authors' code, is NS5(m) with (1 - beta1) eps.
    "mars-shampoo": Rule(mars_shampoo, (*MOMENTUM, "last_grad"), spectral_scale, lambda h: h.eps * (1 - h.betas[0])),
    "mars-m": Rule(mars_m, (*MOMENTUM, "last_grad"), rms_scale, embeddings_to_adamw=True),
    "adamw": Rule(adamw, ADAMW),
    "muon": Rule(muon, MOMENTUM, spectral_scale, embeddings_to_adamw=True),
    "moonlight": Rule(moonlight, MOMENTUM, rms_scale, embeddings_to_adamw=True),
}
MARS_RULES = frozenset(name for name, rule in RULES.items() if "last_grad" in rule.state)
MATRIX_RULES = frozenset(name for name, rule in RULES.items() if rule.scale)  # the ones that orthogonalise


def state_names(hyper: Hyper) -> tuple[str, ...]:
    """The state tensors that a param group needs, and no other."""
    names = RULES[hyper.rule].state
    if hyper.amsgrad and "exp_avg_sq" in names:
        names = (*names, "max_exp_avg_sq")
    return tuple(name for name in names if not (hyper.memory_efficient and name == "last_grad"))
