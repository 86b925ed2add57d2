"""The update rules written out for one tensor in float64, and the cases in which every path must agree with them."""

from math import prod

import torch
from torch import nn

from mars_hf import MARS

RULES = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon", "moonlight"]
MARS_RULES = RULES[:4]
ORTHOGONAL = {"mars-shampoo", "mars-m", "muon", "moonlight"}
OPTIONS = {"lr": 0.1, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.1, "gamma": 0.025, "clip_c": 1.0}
LEAN = {"memory_efficient": True, "clip_c": None}

# rule and what differs from OPTIONS
CASES = {
    **{rule: (rule, {}) for rule in RULES},
    "mars-adamw, amsgrad": ("mars-adamw", {"amsgrad": True, "betas": (0.9, 0.6)}),
    "mars-adamw, exact": ("mars-adamw", {"is_approx": False, "gamma": 0.5}),
    "mars-adamw, no clip": ("mars-adamw", {"clip_c": None, "weight_decay": 0.0, "eps": 1e-3}),
    "mars-adamw, large gamma": ("mars-adamw", {"gamma": 1.0, "clip_c": 0.2}),
    "mars-adamw, h in bfloat16": ("mars-adamw", {"last_grad_dtype": torch.bfloat16}),
    "mars-adamw, no memory": ("mars-adamw", {"betas": (0.0, 0.0), "gamma": 0.0}),
    "mars-lion, lean": ("mars-lion", {**LEAN, "gamma": 0.3}),
    "mars-lion, h in bfloat16": ("mars-lion", {"last_grad_dtype": torch.bfloat16, "clip_c": 0.3}),
    "mars-shampoo, large eps": ("mars-shampoo", {"eps": 0.5}),
    "mars-m, exact": ("mars-m", {"is_approx": False}),
    "mars-m, lean": ("mars-m", {**LEAN, "gamma": 0.3}),
    "adamw, amsgrad": ("adamw", {"amsgrad": True, "betas": (0.9, 0.6)}),
    "moonlight, no nesterov": ("moonlight", {"nesterov": False}),
}


def params_of(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def grads_of(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(p.shape, generator=generator) * scale).to(p.dtype) for p in params]


def run(optimizer, params, steps=4, first=0, scale=1.0):
    for t in range(first, first + steps):
        for p, g in zip(params, grads_of(params, t, scale)):
            p.grad = g
        optimizer.step()
    return [p.detach().clone() for p in params]


def by_rule(params, rule, **kwargs):
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "rule": rule},
        {"params": [p for p in params if p.ndim < 2], "rule": "adamw"},
    ]
    return MARS([g for g in groups if g["params"]], mars_type=rule, **kwargs)


class ByHand:
    """One tensor under one rule, all in float64, a line of code for each equation.

    Args:
        rule: its name.
        options: the arguments of `MARS` that matter to it.
        p: the parameter; copied.
    """

    def __init__(self, rule, options, p):
        self.rule, self.options = rule, {**OPTIONS, "ns_steps": 5, "nesterov": True, **options}
        self.p = p.detach().double().clone()
        self.m, self.v, self.v_max, self.h = (torch.zeros_like(self.p) for _ in range(4))
        self.t = 0

    def step(self, g, lr):
        """One step; `h` holds the reference gradient."""
        o, g = self.options, g.double()
        (beta1, beta2), eps = o["betas"], o["eps"]
        self.t += 1
        c = g
        if self.rule in MARS_RULES:
            c = g + o["gamma"] * beta1 / (1 - beta1) * (g - self.h)
            if o["clip_c"] is not None and c.norm() > o["clip_c"]:
                c = c * (o["clip_c"] / c.norm())
        self.m = beta1 * self.m + (g if self.rule in ("muon", "moonlight") else (1 - beta1) * c)
        self.v = beta2 * self.v + (1 - beta2) * c**2
        self.v_max = torch.maximum(self.v_max, self.v)
        rows, cols = (self.p.shape[0], prod(self.p.shape[1:])) if self.p.ndim >= 2 else (1, 1)
        spectral, rms = max(1, rows / cols) ** 0.5, 0.2 * max(rows, cols) ** 0.5
        nesterov = g + beta1 * self.m if o["nesterov"] else self.m
        if self.rule in ("mars-adamw", "adamw"):
            v = self.v_max if o.get("amsgrad") else self.v
            u = self.m / (1 - beta1**self.t) / ((v / (1 - beta2**self.t)).sqrt() + eps)
        elif self.rule == "mars-lion":
            u = self.m.sign()
        elif self.rule == "mars-shampoo":
            u = spectral * self.ns(self.m / (1 - beta1), eps)
        elif self.rule == "mars-m":
            u = rms * self.ns(self.m, 1e-7)
        else:
            u = (spectral if self.rule == "muon" else rms) * self.ns(nesterov, 1e-7)
        self.p = self.p - lr * (o["weight_decay"] * self.p + u)

    def ns(self, m, eps):
        """The quintic polynomial of the singular values, which are found here."""
        u, s, v = torch.linalg.svd(m.reshape(len(m), -1), full_matrices=False)
        s = s / (m.norm() + eps)
        for _ in range(self.options["ns_steps"]):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return (u * s @ v).reshape(m.shape)
