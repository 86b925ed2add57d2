"""fused=True: what is compiled and how often, what is refused, and the scale and the skip that are handed to step()."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from optim_cases import MARS_RULES, RULES, by_rule, grads_of, params_of, run
from torch import nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

from mars_hf import MARS

EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("rule", MARS_RULES)
def test_one_compilation_for_each_function(rule, compiles):
    """Whatever the shapes, the schedule, the hyperparameters, gradients that come late, and a second model."""
    torch._dynamo.reset()
    compiled = sys.modules["mars_hf.optim.compiled"]
    compiled._compiled.cache_clear()
    MARS(params_of((2, 2)), fused=True)  # asks for the compiler, which takes a graph
    before = counters["stats"]["unique_graphs"]
    for shapes, options in (
        ([(6, 4), (5, 3), (9, 9), (3, 2, 2, 2)], {"gamma": 0.1}),
        ([(3, 8)], {"betas": (0.8, 0.7), "eps": 1e-3}),
    ):
        params = params_of(*shapes)
        optimizer = by_rule(params, rule, weight_decay=0.1, fused=True, **options)
        for t in range(20):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + t)
            for i, (p, g) in enumerate(zip(params, grads_of(params, t))):
                p.grad = None if i == 1 and t < 7 else g
            with torch._dynamo.config.patch(error_on_recompile=True):
                optimizer.step()
    assert counters["stats"]["unique_graphs"] - before == 2, "the norm of c, and the rule"


def test_small_tensors_beside_large_ones_are_the_same_update(compiler, monkeypatch):
    shapes = [(6, 4), (30, 30), (3, 3), (40, 20)]
    expected = run(by_rule(small := params_of(*shapes), "mars-m", ns_dtype=torch.float32), small)
    monkeypatch.setattr("mars_hf.optim.compiled.SMALL", 100)
    mixed = params_of(*shapes)
    got = run(by_rule(mixed, "mars-m", ns_dtype=torch.float32, fused=True), mixed)
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last_grad_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion"])
def test_values_that_are_not_finite_stay_where_eager_passes_put_them(rule, last_grad_dtype, compiles):
    outcomes = []
    for fused in (False, True):
        p = nn.Parameter(torch.ones(9, 5))
        optimizer = MARS([p], mars_type=rule, last_grad_dtype=last_grad_dtype, fused=fused)
        for t in range(2):
            p.grad = torch.ones(9, 5)
            if t == 0:
                p.grad.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
            optimizer.step()
        outcomes.append([p.detach(), *optimizer.state[p].values()])
    assert_close(outcomes[1], outcomes[0], equal_nan=True)


def test_nothing_depends_on_fused_but_the_speed(compiles):
    """A state saved with it loads without it, and the other way round; copies keep it."""
    for first, second in ((False, True), (True, False)):
        left, right = params_of((6, 4), (4,)), params_of((6, 4), (4,))
        saved, loaded = MARS(left, fused=first), MARS(right, fused=second)
        run(saved, left)
        state_dict = copy.deepcopy(saved.state_dict())
        assert not any("fused" in group for group in state_dict["param_groups"])
        loaded.load_state_dict(state_dict)
        with torch.no_grad():
            for p, q in zip(left, right):
                q.copy_(p)
        assert_close(run(loaded, right, first=4), run(saved, left, first=4), rtol=1e-6, atol=1e-6)
        for again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
            assert again.defaults["fused"] is second
            again.step()


def test_autograd_sees_the_writes(compiles):
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([p], fused=True)
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_dtype_that_is_not_served_is_refused(compiler):
    weight = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"fused=True serves.*'weight' .* is torch.float8_e4m3fn.*leave fused out"):
        MARS([("weight", weight)], fused=True)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_fused_is_true_or_false(value):
    with pytest.raises(ValueError, match=f"fused={value!r} must be"):
        MARS([nn.Parameter(torch.ones(2, 2))], fused=value)


def test_fused_holds_for_all_groups():
    with pytest.raises(ValueError, match="fused=True in a param group"):
        MARS([{"params": [nn.Parameter(torch.ones(2, 2))], "fused": True}])


def test_without_a_compiler_one_line_says_what_to_do(tmp_path):
    code = (
        "import torch; from mars_hf import MARS; p = torch.nn.Parameter(torch.ones(2, 2)); MARS([p])\n"
        "try: MARS([p], fused=True)\n"
        "except ValueError as error: print(error)"
    )
    env = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("fused=True: torch.compile fails (") and "no-such-compiler" in printed
    assert printed.endswith("leave fused out, or install what it needs (on CPUs a C++ compiler with OpenMP, g++)\n")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("fused", [False, True], indirect=True)
@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("rule", RULES)
def test_grad_scale_divides_the_gradients_once_and_leaves_them(rule, scale, fused):
    left, right = params_of((6, 4), (4,)), params_of((6, 4), (4,))
    options = {"ns_dtype": torch.float32, "clip_c": 0.5, "fused": fused}
    divided, scaled = by_rule(left, rule, **options), by_rule(right, rule, **options)
    for t in range(4):
        for p, q, g in zip(left, right, grads_of(left, t)):
            p.grad, q.grad = g.clone(), g * (4 if t % 2 else 1)
        kept = [q.grad.clone() for q in right]
        if t % 2:
            scaled.grad_scale = scale
        divided.step()
        scaled.step()
        assert_close([q.grad for q in right], kept, **EXACT)
        assert_close([q.detach() for q in right], [p.detach() for p in left], **EXACT)


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m"])
def test_a_grad_scaler_hands_over_its_scale_and_a_skipped_step_leaves_all_as_it_was(rule, compiles):
    """torch's protocol, with a scale of the caller's own too; an overflow at step 2."""
    left, right = params_of((6, 4), (4,)), params_of((6, 4), (4,))
    plain = by_rule(left, rule, ns_dtype=torch.float32, fused=True)
    amp = by_rule(right, rule, ns_dtype=torch.float32, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for t in range(5):
        for p, q, g in zip(left, right, grads_of(left, t)):
            p.grad, q.grad = g / 2, scaler.scale(g.clone()) * (float("inf") if t == 2 else 1.0)
        amp.grad_scale = 2.0
        before, state = [q.detach().clone() for q in right], copy.deepcopy(amp.state_dict()["state"])
        scaler.step(amp)
        scaler.update()
        if t == 2:
            assert_close([q.detach() for q in right], before, **EXACT)
            assert_close(amp.state_dict()["state"], state, **EXACT)
        else:
            plain.step()
            assert_close([q.detach() for q in right], [p.detach() for p in left], rtol=1e-6, atol=1e-7)
        assert not hasattr(amp, "found_inf")


def test_an_error_changes_nothing_and_consumes_the_scale(compiles):
    p = params_of((4, 4))[0]
    optimizer = MARS([p], fused=True)
    run(optimizer, [p], steps=1)
    before, good = p.detach().clone(), optimizer.state[p]["exp_avg_sq"]
    optimizer.state[p]["exp_avg_sq"] = torch.zeros(2, 2)
    optimizer.grad_scale = 2.0
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(4, 4\)\) has a state 'exp_avg_sq' of shape \(2, 2\)"):
        optimizer.step()
    assert_close(p.detach(), before, **EXACT)
    assert optimizer.state[p]["step"] == 1 and optimizer.grad_scale == 1.0
    optimizer.state[p]["exp_avg_sq"] = good
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr=nan must be a finite number"):
        optimizer.step()
    assert_close(p.detach(), before, **EXACT)
