"""Identities between rules, in float64 below 1e-12 with the clip inactive."""

from functools import partial

import pytest
import torch

from mars_hf import MARS

SHAPES = [(8, 20), (24, 6), (12, 12), (12,)]
STEPS = 8
# Newton-Schulz adds an absolute eps to the norm, which is not scale-invariant; gradients this large make it vanish.
LARGE = 1e7
NS = {"ns_dtype": torch.float64, "clip_c": None}


@pytest.fixture(autouse=True)
def both_paths(fused, monkeypatch):
    """Every identity holds for the eager and for the compiled passes."""
    monkeypatch.setitem(globals(), "MARS", partial(MARS, fused=fused))


def gradients(scale: float = 1.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES] for _ in range(STEPS)]
    return [[scale * g for g in row] for row in draw]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]


def train(build, grads) -> list[torch.Tensor]:
    params = parameters()
    optimizer = build(params)
    for row in grads:
        for p, g in zip(params, row):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


def groups(params, rule):
    return [{"params": [p for p in params if p.ndim == 2], "rule": rule}, {"params": params[-1:], "rule": "adamw"}]


def assert_same(left, right):
    for a, b, shape in zip(left, right, SHAPES):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda m, shape=shape: f"{shape}: {m}")


def test_mars_adamw_without_gamma_is_adamw():
    common = {"lr": 1e-2, "betas": (0.95, 0.99), "weight_decay": 0.1}
    mars = train(lambda p: MARS(p, gamma=0.0, clip_c=None, optimize_1d=True, **common), gradients())
    adamw = train(lambda p: torch.optim.AdamW(p, **common), gradients())
    assert_same(mars, adamw)


def test_baseline_adamw_is_torch_adamw():
    common = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    assert_same(
        train(lambda p: MARS(p, mars_type="adamw", **common), gradients()),
        train(lambda p: torch.optim.AdamW(p, **common), gradients()),
    )


def test_mars_lion_contains_lion():
    """beta1 = 0.99 and gamma = (0.99 - 0.9) / 0.99 is Lion(0.9, 0.99), written out here."""
    lr, wd, beta1, beta2 = 1e-3, 0.1, 0.9, 0.99
    expected = parameters()
    averages = [torch.zeros_like(p) for p in expected]
    with torch.no_grad():
        for row in gradients():
            for p, m, g in zip(expected, averages, row):
                p.sub_(lr * (wd * p + torch.sign(beta1 * m + (1 - beta1) * g)))
                m.mul_(beta2).add_(g, alpha=1 - beta2)
    mars = train(
        lambda p: MARS(
            p,
            mars_type="mars-lion",
            lr=lr,
            weight_decay=wd,
            betas=(beta2, 0.0),
            gamma=(beta2 - beta1) / beta2,
            clip_c=None,
            optimize_1d=True,
        ),
        gradients(),
    )
    assert_same(mars, [p.detach() for p in expected])


def test_mars_m_without_gamma_is_moonlight_without_nesterov():
    left = train(lambda p: MARS(groups(p, "mars-m"), mars_type="mars-m", gamma=0.0, **NS), gradients(LARGE))
    right = train(lambda p: MARS(groups(p, "moonlight"), mars_type="moonlight", nesterov=False, **NS), gradients(LARGE))
    assert_same(left, right)


def test_mars_m_with_gamma_one_minus_beta_is_moonlight_with_nesterov():
    left = train(lambda p: MARS(groups(p, "mars-m"), mars_type="mars-m", gamma=0.05, **NS), gradients(LARGE))
    right = train(lambda p: MARS(groups(p, "moonlight"), mars_type="moonlight", **NS), gradients(LARGE))
    assert_same(left, right)


def test_momentum_is_scale_invariant_and_accumulation_scales_both_thresholds():
    """Section 4: micro-batches averaged instead of summed give the same trajectory with clip_c / k."""
    k = 4
    summed = train(lambda p: MARS(p, clip_c=1.0, eps=0.0, betas_1d=(0.9, 0.95)), gradients(0.1))
    averaged = train(lambda p: MARS(p, clip_c=1.0 / k, eps=0.0, betas_1d=(0.9, 0.95)), gradients(0.1 / k))
    assert_same(summed, averaged)


def quadratic(params, batch):
    return sum(((p - target) ** 2).sum() + (p**4).sum() * 0.1 for p, target in zip(params, batch))


def exact_loop(optimizer, params, batches):
    """The authors' look-ahead loop."""
    for t, batch in enumerate(batches):
        if t + 1 < len(batches):
            quadratic(params, batches[t + 1]).backward()
            optimizer.update_previous_grad()
            optimizer.zero_grad()
        quadratic(params, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.update_last_grad()


@pytest.mark.parametrize("mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
@pytest.mark.parametrize("repeats", [True, False])
def test_exact_uses_the_gradient_of_this_batch_at_the_previous_parameters(mars_type, repeats):
    """h differentiated by hand at the kept previous parameters, fed through approx mode's own rule."""
    rows = gradients()
    batches = [rows[0]] * STEPS if repeats else rows
    params = parameters()
    exact_loop(
        MARS(groups(params, mars_type), mars_type=mars_type, is_approx=False, ns_dtype=torch.float64), params, batches
    )

    expected = parameters()
    by_hand = MARS(groups(expected, mars_type), mars_type=mars_type, ns_dtype=torch.float64)
    previous = None
    for batch in batches:
        if previous is not None:
            h = torch.autograd.grad(quadratic(previous, batch), previous)
            for p, g in zip(expected, h):
                if "last_grad" in by_hand.state[p]:
                    by_hand.state[p]["last_grad"].copy_(g)
        previous = [p.detach().clone().requires_grad_() for p in expected]
        quadratic(expected, batch).backward()
        by_hand.step()
        by_hand.zero_grad()
    assert_same([p.detach() for p in params], [p.detach() for p in expected])


def test_repeated_batch_approx_equals_exact():
    """With one batch for ever the gradient of the step before is the gradient at the previous parameters."""
    batches = [gradients()[0]] * STEPS
    exact, approx = parameters(), parameters()
    exact_loop(MARS(exact, is_approx=False), exact, batches)
    exact_loop(MARS(approx, is_approx=True), approx, batches)
    assert_same([p.detach() for p in exact], [p.detach() for p in approx])
