"""fused=True: the same update as the eager passes, in one; refused where it cannot be served."""

import copy
import math
import pickle
import random
import sys

import pytest
import torch
from torch import nn

from mars_hf import MARS
from mars_hf.optim import apply
from mars_hf.optim import fused as passes

# Several blocks with a tail, one block exactly, one element more; convolutions, vectors, a scalar, an empty tensor.
SHAPES = [(131, 401), (128, 128), (5, 3277), (7, 5), (6, 4, 3, 3), (1, 1), (17,), (), (0, 3)]
CASES = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", *(f"{r} lean" for r in ("mars-lion", "mars-m"))]

# Of the largest element that a tensor has had. The two paths round differently, and the eager norm of c is summed in
# float32; Newton-Schulz, kept to two steps here, multiplies the rounding of a small singular value of m by 3.4 a step.
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-13}


needs_compiler = pytest.mark.usefixtures("compiler")


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    params[3] = nn.Parameter(params[3].detach().T.contiguous().T)
    params[4] = nn.Parameter(params[4].detach().contiguous(memory_format=torch.channels_last))
    assert not params[3].is_contiguous() and not params[4].is_contiguous()
    return params


def groups(params, rule):
    """Vectors follow the rule too, where it has a meaning for them."""
    if rule in ("mars-adamw", "mars-lion"):
        return [{"params": params, "rule": rule}]
    matrices = [p for p in params if p.ndim >= 2]
    return [{"params": matrices, "rule": rule}, {"params": [p for p in params if p.ndim < 2], "rule": "mars-adamw"}]


def set_gradients(left, right, seed, scales):
    generator = torch.Generator().manual_seed(seed)
    for p, q, scale in zip(left, right, scales):
        g = torch.randn(p.shape, generator=generator).to(p.dtype) * scale / math.sqrt(max(1, p.numel()))
        p.grad, q.grad = g.clone(), g.clone()  # contiguous, also where the parameter is not


def assert_close(actual, expected, what, largest=None):
    """`largest` keeps, for each `what`, the largest element it has had."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    if largest is not None:
        scale = largest[what] = max(scale, largest.get(what, 0.0))
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=TOLERANCE[expected.dtype] * scale, msg=lambda m: f"{what}: {m}"
    )


@needs_compiler
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_fused_is_the_eager_update(case, dtype, seed, monkeypatch):
    """Random options; gradients on both sides of the clip, and tensors that move from one side to the other."""
    draw = random.Random(f"{case} {dtype} {seed}")
    rule, lean = case.split()[0], case.endswith("lean")
    is_approx = lean or draw.random() < 0.7
    options = {
        "lr": 1e-2,
        "betas": (draw.choice([0.95, 0.9, 0.3, 0.0]), draw.choice([0.99, 0.0])),
        "eps": draw.choice([1e-8, 1e-3]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "gamma": draw.choice([0.025, 0.3, 0.0]),
        "clip_c": None if lean else draw.choice([1.0, 0.2, None]),
        "last_grad_dtype": None if lean else draw.choice([None, torch.bfloat16]),
        "is_approx": is_approx,
        "ns_dtype": torch.float64,
        "ns_steps": 2,
    }
    left, right = parameters(dtype), parameters(dtype)

    def build(params, fused=None):
        ready = [{**g, "memory_efficient": lean} for g in groups(params, rule)[: 1 if lean else 2]]
        return MARS(ready, mars_type=rule, fused=fused, **options)

    eager, compiled = build(left), build(right, True)
    largest = {}
    threads = torch.get_num_threads()
    for t in range(5):
        scales = [draw.choice([0.01, 0.3, 3.0]) for _ in SHAPES]
        if not is_approx:
            set_gradients(left, right, 100 + t, scales)
            eager.update_previous_grad()
            compiled.update_previous_grad()
        set_gradients(left, right, t, scales)
        eager.step()
        with monkeypatch.context() as patch:
            patch.setattr(apply, "chunks", lambda *args: pytest.fail("a MARS rule ran its eager passes"))
            torch.set_num_threads(2 if t == 1 else 1)
            try:
                compiled.step()
            finally:
                torch.set_num_threads(threads)
        eager.update_last_grad()
        compiled.update_last_grad()
        for p, q in zip(left, right):
            if not p.numel():
                continue
            assert eager.state[p].keys() == compiled.state[q].keys()
            for name, tensor in eager.state[p].items():
                if name == "previous_grad":  # memory for the next look-ahead
                    continue
                if tensor.dtype == torch.bfloat16 or name == "step":
                    assert torch.equal(compiled.state[q][name], tensor), f"{name} of {tuple(p.shape)}, step {t}"
                else:
                    assert_close(compiled.state[q][name], tensor, f"{options}: {name} of {tuple(p.shape)}", largest)
            if rule == "mars-lion":
                # Where m (lean: n + gamma g) is rounding noise around 0, so is its sign.
                m = eager.state[p]["exp_avg"] + (options["gamma"] * p.grad if lean else 0)
                noise = m.abs() < 10 * TOLERANCE[dtype] * m.abs().max()
                with torch.no_grad():
                    q[noise] = p[noise]
            assert_close(q.detach(), p.detach(), f"{options}: parameter {tuple(p.shape)}", largest)


@needs_compiler
@pytest.mark.parametrize("h_dtype", [torch.float32, torch.bfloat16])
def test_norms_do_not_depend_on_the_threads_and_write_nothing(h_dtype):
    grads = [p.detach() for p in parameters(torch.float32)]
    generator = torch.Generator().manual_seed(1)
    last_grads = [torch.randn(g.shape, generator=generator).to(h_dtype) for g in grads]
    kept = [h.clone() for h in last_grads]
    threads, squares = torch.get_num_threads(), []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        squares.append(passes.squared_norms_of_c(grads, last_grads, {"gamma": 0.025, "betas": (0.95, 0.99)}))
    torch.set_num_threads(threads)
    for square, g, h in zip(squares[0], grads, last_grads):
        if g.is_contiguous():  # the pass goes by address
            c = g.double() + 0.475 * (g.double() - h.double())
            rounding = 3e-7 * (g.square().sum() + h.double().square().sum()).item()  # of c to float32
            torch.testing.assert_close(square, c.square().sum(), rtol=0, atol=rounding)
    assert torch.equal(squares[0], squares[1]) and torch.equal(squares[0], squares[2])
    assert all(torch.equal(a, b) for a, b in zip(kept, last_grads))


@needs_compiler
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion"])
@pytest.mark.parametrize("last_grad_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("clip_c", [1.0, None])
def test_values_that_are_not_finite_stay_where_eager_passes_put_them(rule, last_grad_dtype, clip_c):
    outcomes = []
    for argument in (None, True):
        outcomes.append([])
        p = nn.Parameter(torch.ones(9, 5))
        optimizer = MARS([p], mars_type=rule, clip_c=clip_c, last_grad_dtype=last_grad_dtype, fused=argument)
        for t in range(2):
            p.grad = torch.ones(9, 5)
            if t == 0:
                p.grad.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
                p.grad.view(torch.int32)[0, 3] = 0x7FFFFFFF  # a nan that rounding up would turn into -0
            optimizer.step()
            outcomes[-1] += [tensor.detach().clone() for tensor in (p, *optimizer.state[p].values())]
    for eager, compiled in zip(*outcomes):
        torch.testing.assert_close(compiled, eager, equal_nan=True)


@needs_compiler
def test_momentum_without_beta_forgets_exactly():
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], betas=(0.0, 0.9), gamma=0.0, clip_c=None, fused=True)
    for size in (1e8, 1e-8):
        p.grad = torch.full((2, 2), size)
        optimizer.step()
    assert torch.equal(optimizer.state[p]["exp_avg"], p.grad)


@needs_compiler
def test_exact_mode_only_reads_the_reference():
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], is_approx=False, fused=True)
    for size in (1.0, 2.0):
        p.grad = torch.full((2, 2), size)
        optimizer.update_previous_grad()
        optimizer.step()
        if size == 1.0:
            optimizer.update_last_grad()
    assert torch.equal(optimizer.state[p]["last_grad"], torch.full((2, 2), 1.0))


@needs_compiler
def test_nothing_depends_on_fused_but_the_speed():
    """A state saved with it loads without it, and the other way round; copies keep it."""
    for first, second in ((None, True), (True, None)):
        left, right = parameters(torch.float32), parameters(torch.float32)
        saved, loaded = (MARS(groups(ps, "mars-adamw"), fused=f) for ps, f in ((left, first), (right, second)))
        set_gradients(left, right, 0, [1.0] * len(SHAPES))
        saved.step()
        state_dict = copy.deepcopy(saved.state_dict())
        assert not any("fused" in group for group in state_dict["param_groups"])
        loaded.load_state_dict(state_dict)
        with torch.no_grad():
            for p, q in zip(left, right):
                q.copy_(p)
        set_gradients(left, right, 1, [1.0] * len(SHAPES))
        saved.step()
        loaded.step()
        for p, q in zip(left, right):
            assert_close(q.detach(), p.detach(), f"parameter {tuple(p.shape)}")
        for again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
            assert again.defaults["fused"] is second
            again.step()


@needs_compiler
def test_autograd_sees_the_writes():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([p], fused=True)
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_compiler
def test_rules_without_a_pass_run_as_ever():
    for mars_type in ("adamw", "muon", "moonlight"):
        p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        optimizer = MARS([{"params": [p], "rule": mars_type}], mars_type=mars_type, lr=0.1, fused=True)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p < 1).all()


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (torch.ones(4, 4, dtype=torch.bfloat16), {}, r"'weight' \(shape \(4, 4\)\) is torch.bfloat16 on cpu"),
        (torch.ones(4, 4, device="meta"), {}, r"'weight'.* on meta"),
        (torch.ones(4, 4), {"amsgrad": True}, "amsgrad=True"),
        (torch.ones(4, 4), {"last_grad_dtype": torch.float16}, "last_grad_dtype=torch.float16.*torch.bfloat16"),
        (torch.ones(4, 4, dtype=torch.float64), {"last_grad_dtype": torch.float32}, "last_grad_dtype=torch.float32"),
    ],
)
def test_what_has_no_pass_is_refused(params, options, message):
    with pytest.raises(ValueError, match=f"fused=True.*{message}.*leave fused out"):
        MARS([("weight", nn.Parameter(params))], fused=True, **options)


@pytest.mark.parametrize("value", [1, "yes"])
def test_fused_is_true_false_or_none(value):
    with pytest.raises(ValueError, match=f"fused={value!r} must be"):
        MARS([nn.Parameter(torch.ones(2, 2))], fused=value)


def test_fused_holds_for_all_groups():
    with pytest.raises(ValueError, match="fused=True in a param group"):
        MARS([{"params": [nn.Parameter(torch.ones(2, 2))], "fused": True}])


@needs_compiler
def test_options_that_come_with_a_checkpoint_are_refused_before_anything_changes():
    p = nn.Parameter(torch.ones(4, 4))
    other = MARS([p], amsgrad=True)
    p.grad = torch.ones(4, 4)
    other.step()
    optimizer = MARS([p], fused=True)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    with pytest.raises(ValueError, match="fused=True does not serve amsgrad=True"):
        optimizer.step()
    assert torch.equal(p.detach(), before)
    assert all(torch.equal(optimizer.state[p][name], state[name]) for name in state)


@needs_compiler
def test_state_of_another_shape_is_refused():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([p], fused=True, clip_c=None)
    p.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"exp_avg_sq of shape \(2, 2\).*parameter of shape \(4, 4\)"):
        optimizer.step()


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("no-such-compiler", "found no C\\+\\+ compiler.*no-such-compiler"),
        (f"{sys.executable} -c 'exit(\"error: no OpenMP\\nmore\")'", "could not be built, .* says 'error: no OpenMP'"),
    ],
)
def test_without_a_compiler_one_line_says_what_to_do(cxx, message, monkeypatch):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(passes, "passes", passes.passes.__wrapped__)
    with pytest.raises(ValueError, match=f"fused=True {message}.*leave fused out, or install g\\+\\+") as error:
        MARS([nn.Parameter(torch.ones(2, 2))], fused=True)
    assert "\n" not in str(error.value)
    MARS([nn.Parameter(torch.ones(2, 2))])
