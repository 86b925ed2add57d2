"""Every rule, eager and compiled, in every dtype and memory layout, is the rule written out by hand."""

import math

import pytest
import torch
from optim_cases import CASES, MARS_RULES, OPTIONS, ORTHOGONAL, ByHand
from torch import nn

from mars_hf import MARS

SHAPES = [(40, 33), (33, 40), (7, 5), (7, 5), (6, 4, 3, 3), (1, 1), (0, 3)]
VECTORS = [(129,), (1,), ()]
STEPS = 6
LATE, FIRST = 2, 2  # the place of a tensor without gradients before this step

# Of the way that a tensor went: half precision rounds each update and the state to its own spacing.
BOUND = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 0.02, torch.bfloat16: 0.15}
# A sign is decided by rounding where |m| is smaller than this by the largest m or g.
NOISE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.2}


def parameters(rule, dtype, layout):
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES + ([] if rule in ORTHOGONAL else VECTORS)
    params = [nn.Parameter((0.1 * torch.randn(s, generator=generator)).to(dtype)) for s in shapes]
    if layout == "strided":
        for i in (0, 2):
            params[i] = nn.Parameter(params[i].detach().T.contiguous().T)
        params[4] = nn.Parameter(params[4].detach().contiguous(memory_format=torch.channels_last))
    return params


def gradients(params, t):
    """On both sides of the clip, and from one side to the other."""
    generator = torch.Generator().manual_seed(100 + t)
    scales = [(0.1, 0.5, 3.0)[(t + i) % 3] for i in range(len(params))]
    return [
        (torch.randn(p.shape, generator=generator) * scale / math.sqrt(max(1, p.numel()))).to(p.dtype)
        for p, scale in zip(params, scales)
    ]


def train(case, dtype, layout, fused):
    """The parameters, those by hand, and where the ones by hand are no matter of rounding."""
    rule, options = CASES[case]
    if dtype.itemsize == 2:  # in which 1e-8 is 0
        options = {"eps": 1e-2, **options}
    params = parameters(rule, dtype, layout)
    ns = {"ns_dtype": torch.float64 if dtype == torch.float64 else torch.float32, "ns_steps": 3}
    arguments = {**OPTIONS, **options, **ns}
    # Numbers that change after something was compiled: another optimizer first, and a schedule.
    if fused:
        first = parameters(rule, dtype, layout)
        other = {"lr": 0.5, "betas": (0.3, 0.4), "eps": 0.1, "weight_decay": 0.7, "gamma": 0.6}
        optimizer = MARS([{"params": first, "rule": rule}], mars_type=rule, fused=True, **{**arguments, **other})
        for p, g in zip(first, gradients(first, 9)):
            p.grad = g
        optimizer.step()
    optimizer = MARS([{"params": params, "rule": rule}], mars_type=rule, fused=fused, **arguments)
    by_hand = [ByHand(rule, {**options, "ns_steps": 3}, p) for p in params]
    certain = [torch.ones(p.shape, dtype=torch.bool) for p in params]
    h_dtype = options.get("last_grad_dtype") or dtype
    for t in range(STEPS):
        lr = optimizer.param_groups[0]["lr"] = OPTIONS["lr"] / (1 + t)
        if rule in MARS_RULES and not options.get("is_approx", True):
            for p, g in zip(params, gradients(params, 50 + t)):
                p.grad = g
            optimizer.update_previous_grad()
        for i, (p, g) in enumerate(zip(params, gradients(params, t))):
            p.grad = None if i == LATE and t < FIRST else g
        kept = [None if p.grad is None else p.grad.clone() for p in params]
        optimizer.step()
        for p, g in zip(params, kept):
            assert p.grad is g or torch.equal(p.grad, g), "step() wrote the gradient"
        optimizer.update_last_grad()
        for p, one, sure in zip(params, by_hand, certain):
            if p.grad is None or not p.numel():
                continue
            one.step(p.grad, lr)
            largest = torch.maximum(one.m.abs().max(), p.grad.abs().max())
            sure &= (one.m.abs() > NOISE[dtype] * largest) | (rule != "mars-lion")
        h = gradients(params, t if options.get("is_approx", True) else 50 + t)
        for i, (one, g) in enumerate(zip(by_hand, h)):
            if options.get("is_approx", True) and i == LATE and t < FIRST:
                continue
            one.h = g.to(h_dtype).double()
    return optimizer, params, by_hand, certain


@pytest.mark.parametrize(
    ("fused", "layout"),
    [(False, "plain"), (False, "strided"), (False, "pieces"), (True, "plain"), (True, "strided")],
    indirect=["fused"],
)
@pytest.mark.parametrize("dtype", BOUND, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_rule(case, dtype, layout, fused, monkeypatch):
    if layout == "pieces":
        monkeypatch.setattr("mars_hf.optim.chunks.CPU_CHUNK_BYTES", 400)
        monkeypatch.setattr("mars_hf.optim.sharding.base.STACK_ELEMENTS", 2000)
        monkeypatch.setattr("mars_hf.optim.newton_schulz.ALONE", 20)
    start = parameters(CASES[case][0], dtype, layout)
    optimizer, params, by_hand, certain = train(case, dtype, layout, fused)
    for p, one, sure, p0 in zip(params, by_hand, certain, start):
        if not p.numel():
            assert "exp_avg" not in optimizer.state.get(p, ())
            continue
        assert p.dtype == dtype and p.stride() == p0.stride()
        if dtype.itemsize == 2 and p.numel() == 1:  # one element, and one rounding decides
            continue
        off = ((p.double() - one.p) * sure).norm() / (one.p - p0.double()).norm()
        assert off < BOUND[dtype], f"{tuple(p.shape)}: off by {off:.1e} of the way"
        if "step" in optimizer.state[p]:
            assert optimizer.state[p]["step"] == one.t
