"""The mathematics of every update rule, as functions over lists of tensors.

Notation: p parameter, g gradient (after the global clip), h reference gradient (`last_grad`), m `exp_avg`,
v `exp_avg_sq`, wd weight decay, always decoupled; the p on the right of an update is the value before the step.

    alpha = gamma beta1 / (1 - beta1)
    c     = g + alpha (g - h)                     corrected gradient; MARS paper, arXiv 2411.10438
    c     = c / max(1, ||c||_2 / clip_c)          one norm for each whole tensor
    m     = beta1 m + (1 - beta1) c

    mars-adamw    v = beta2 v + (1 - beta2) c^2;  AdamW with m and v
    mars-lion     p -= lr (wd p + sign(m))
    mars-shampoo  p -= lr (wd p + max(1, rows / cols)^0.5 NS5(m / (1 - beta1)))
    mars-m        p -= lr (wd p + 0.2 sqrt(max(rows, cols)) NS5(m))                      arXiv 2510.21800
    muon          b = beta1 b + g;  p -= lr (wd p + max(1, rows / cols)^0.5 NS5(g + beta1 b))
    moonlight     the same with 0.2 sqrt(max(rows, cols)) before NS5
    adamw         m and v from g;  p -= lr (wd p + m / ((sqrt(v) / sqrt(1 - beta2^t) + eps) (1 - beta1^t)))

In every function the lists run over the same tensors, which share device and dtype. `state` maps each of
`state_names(hyper)` to its list; `hyper` is the param group (lr, betas, eps, ... as documented in `MARS`). A name that
ends in an underscore modifies `params` or the tensors of `state` in place; gradients are only read.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from mars_hf.optim.newton_schulz import newton_schulz

Tensors = list[Tensor]
State = Mapping[str, Tensors]
Hyper = Mapping[str, Any]
Factors = Sequence[Any]  # numbers or 0-dim tensors

RULES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon", "moonlight")
MARS_RULES = frozenset(rule for rule in RULES if rule.startswith("mars-"))
MATRIX_RULES = frozenset({"mars-shampoo", "mars-m", "muon", "moonlight"})  # the ones that orthogonalise

# MARS-M and Muon add this to the Frobenius norm; MARS-Shampoo adds the optimizer's eps (so does the authors' code).
NS_EPS = 1e-7
# On CPU matrices of this many elements go through Newton-Schulz one by one, which keeps each in cache; smaller ones,
# and all on accelerators, go in stacks, which saves calls.
NS_ALONE = 2**16


def state_names(hyper: Hyper) -> tuple[str, ...]:
    """The state tensors that the rule of a param group needs, and no other."""
    rule = hyper["rule"]
    names = ["exp_avg"]
    if rule in ("adamw", "mars-adamw"):
        names += ["step", "exp_avg_sq"] + ["max_exp_avg_sq"] * hyper["amsgrad"]
    if rule in MARS_RULES and not hyper["memory_efficient"]:
        names += ["last_grad"]
    return tuple(names)


def alpha(hyper: Hyper) -> float:
    """gamma beta1 / (1 - beta1)."""
    beta1 = hyper["betas"][0]
    return hyper["gamma"] * beta1 / (1 - beta1)


def corrected_gradients_(grads: Tensors, last_grads: Tensors, hyper: Hyper) -> Tensors:
    """c = lerp(h, g, 1 + alpha), before the clip; written over h where h has the dtype of g."""
    cs = last_grads if last_grads[0].dtype == grads[0].dtype else [h.to(g.dtype) for h, g in zip(last_grads, grads)]
    torch._foreach_lerp_(cs, grads, 1 + alpha(hyper))
    return cs


def squared_norms(tensors: Tensors) -> Tensors:
    """||t||_2^2 of each tensor, 0-dim, in float32 at least."""
    first = tensors[0]
    if first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64):
        # Twice as fast as the norm.
        return [torch.dot(t.view(-1), t.view(-1)) if t.is_contiguous() else t.square().sum() for t in tensors]
    # In float16 a norm would overflow at 65,504.
    dtype = torch.promote_types(first.dtype, torch.float32)
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return list(torch._foreach_mul(norms, norms))


def norm(tensor: Tensor) -> float:
    """||t||_2 as a number, for a tensor on the CPU."""
    return float(squared_norms([tensor])[0]) ** 0.5


def clip_factors(norms: Tensor, clip_c: float) -> Factors:
    """1 / max(1, ||c|| / clip_c) of each tensor: numbers on CPU; on accelerators tensors, which need no host sync."""
    factors = torch.clamp(clip_c / norms, max=1.0)
    return factors.tolist() if factors.device.type == "cpu" else list(factors.unbind())


def scale_(tensors: Tensors, factors: Factors) -> None:
    """Multiplies each tensor by its factor."""
    if isinstance(factors[0], Tensor):
        torch._foreach_mul_(tensors, list(factors))
        return
    for tensor, factor in zip(tensors, factors):
        if factor != 1.0:  # saves a pass over the tensor
            tensor.mul_(factor)


def adamw_(params: Tensors, grads: Tensors, state: State, hyper: Hyper) -> None:
    """AdamW on `grads` (mars-adamw: c) by torch's own kernel, fused where the device has one.

    `step` counts this step already. mars-adamw takes v from the clipped c, as the authors' code does; their README
    prints g^2. amsgrad puts the running maximum of v into the denominator.
    """
    beta1, beta2 = hyper["betas"]
    tensors = (params, grads, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []))
    numbers = {
        **{"lr": hyper["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": hyper["weight_decay"]},
        **{"eps": hyper["eps"], "amsgrad": hyper["amsgrad"], "maximize": False},
    }
    if params[0].device.type in _get_fused_kernels_supported_devices():
        torch._fused_adamw_(*tensors, state["step"], **numbers, grad_scale=None, found_inf=None)
    else:
        # This one counts the step by itself.
        torch_adamw(*tensors, list(torch._foreach_sub(state["step"], 1)), foreach=True, **numbers)


def advance_(grads: Tensors, state: State, hyper: Hyper) -> None:
    """m = beta1 m + (1 - beta1) c, `grads` being c; for muon and moonlight b = beta1 b + g.

    Memory-efficient, `grads` being g: without the clip, n = m - gamma g obeys n = beta1 n + (1 - beta1) (1 - gamma) g,
    so `exp_avg` holds n and nothing holds h (arXiv 2510.21800).
    """
    exp_avgs, beta1 = state["exp_avg"], hyper["betas"][0]
    if hyper["rule"] in MARS_RULES and not hyper["memory_efficient"]:
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        return
    torch._foreach_mul_(exp_avgs, beta1)
    weight = (1 - beta1) * (1 - hyper["gamma"]) if hyper["rule"] in MARS_RULES else 1.0
    torch._foreach_add_(exp_avgs, grads, alpha=weight)


def momenta(grads: Tensors, state: State, hyper: Hyper) -> Tensors:
    """What the sign or NS5 is taken of, `grads` being g: m, n + gamma g, or g + beta1 b. Only to be read."""
    exp_avgs = state["exp_avg"]
    if hyper["rule"] in MARS_RULES:
        return (
            list(torch._foreach_add(exp_avgs, grads, alpha=hyper["gamma"])) if hyper["memory_efficient"] else exp_avgs
        )
    return list(torch._foreach_add(grads, exp_avgs, alpha=hyper["betas"][0])) if hyper["nesterov"] else exp_avgs


def lion_(params: Tensors, grads: Tensors, cs: Tensors, state: State, hyper: Hyper) -> None:
    """mars-lion: p -= lr (wd p + sign(m))."""
    advance_(cs, state, hyper)
    add_updates_(params, list(torch._foreach_sign(momenta(grads, state, hyper))), hyper)


def orthogonalised(matrices: Tensors, hyper: Hyper) -> Tensors:
    """NS5(M) of whole matrices of one shape, as new tensors of that shape in `ns_dtype`.

    A tensor with ndim > 2 counts as the matrix (first dimension, all others), a kernel; with `stacked` in `hyper` as a
    stack of matrices along its first dimension, the experts of a mixture. rows = out_features, cols = in_features; with
    `transposed` they are stored (in_features, out_features), as transformers' Conv1D stores them.
    """
    shape, transposed = matrices[0].shape, hyper["transposed"]
    if shape.numel() >= NS_ALONE and len(matrices) > 1 and matrices[0].device.type == "cpu":
        return [u for matrix in matrices for u in orthogonalised([matrix], hyper)]
    stack = torch.stack(matrices)
    stack = stack.flatten(0, 1) if hyper["stacked"] else stack.flatten(2)
    eps = NS_EPS
    if hyper["rule"] == "mars-shampoo":
        # NS5(m / (1 - beta1)) with eps is NS5(m) with (1 - beta1) eps: this saves a division of every element.
        eps = hyper["eps"] * (1 - hyper["betas"][0])
    stack = newton_schulz(stack.mT if transposed else stack, steps=hyper["ns_steps"], eps=eps, dtype=hyper["ns_dtype"])
    stack = stack.mT if transposed else stack
    return list(stack.reshape(len(matrices), *shape))


def matrix_factor(shape: Sequence[int], hyper: Hyper) -> float:
    """What NS5 is multiplied by, for a whole matrix of this shape, as `orthogonalised` describes it."""
    rows, *others = shape[1:] if hyper["stacked"] else shape
    cols = prod(others)
    if hyper["transposed"]:
        rows, cols = cols, rows
    return spectral_factor(rows, cols) if hyper["rule"] in ("mars-shampoo", "muon") else rms_factor(rows, cols)


def spectral_factor(rows: int, cols: int) -> float:
    """max(1, rows / cols)^0.5."""
    return max(1.0, rows / cols) ** 0.5


def rms_factor(rows: int, cols: int) -> float:
    """0.2 sqrt(max(rows, cols)), which gives the update the root mean square of an AdamW update."""
    return 0.2 * max(rows, cols) ** 0.5


def add_updates_(params: Tensors, updates: Tensors, hyper: Hyper, factors: Sequence[float] | None = None) -> None:
    """p -= lr (wd p + factor u); updates may have another dtype than params where there are factors."""
    if hyper["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - hyper["lr"] * hyper["weight_decay"])
    if factors is None:
        torch._foreach_add_(params, updates, alpha=-hyper["lr"])
        return
    for p, update, factor in zip(params, updates, factors):
        p.add_(update, alpha=-hyper["lr"] * factor)


ELEMENTWISE: dict[str, Callable[[Tensors, Tensors, Tensors, State, Hyper], None]] = {
    "mars-adamw": lambda params, grads, cs, state, hyper: adamw_(params, cs, state, hyper),
    "adamw": lambda params, grads, cs, state, hyper: adamw_(params, grads, state, hyper),
    "mars-lion": lion_,
    **dict.fromkeys(MATRIX_RULES, lambda params, grads, cs, state, hyper: advance_(cs, state, hyper)),
}
