"""Faults seen in public implementations of MARS, each of which must stay out (those that one process can show)."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mars_hf import MARS, mars_param_groups
from mars_hf.optim.apply import NormBounds

RULES = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"]


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


@pytest.mark.parametrize("rule", RULES)
def test_reference_gradient_is_the_optimizers_own_memory(rule):
    """Engines and zero_grad(set_to_none=False) write the next gradient over the memory of this one."""
    fresh, reused = params_of((6, 4), (4,)), params_of((6, 4), (4,))
    expected = run(by_rule(fresh, rule), fresh)
    optimizer = by_rule(reused, rule)
    buffers = [torch.zeros_like(p) for p in reused]
    for t in range(4):
        for p, buffer, g in zip(reused, buffers, grads_of(reused, t)):
            p.grad = buffer.zero_().add_(g)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for a, b in zip(expected, reused):
        torch.testing.assert_close(b.detach(), a, rtol=0, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_step_leaves_the_gradient_alone(rule):
    params = params_of((6, 4), (4,))
    optimizer = by_rule(params, rule)
    for t in range(3):
        grads = grads_of(params, t)
        for p, g in zip(params, grads):
            p.grad = g.clone()
        optimizer.step()
        for p, g in zip(params, grads):
            torch.testing.assert_close(p.grad, g, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 0.3),
        ("eps", 1e-2),
        ("lr", 0.2),
        ("betas", (0.5, 0.6)),
        ("weight_decay", 0.5),
        ("clip_c", 0.1),
        ("clip_c", None),
        ("amsgrad", True),
    ],
)
def test_group_override_equals_constructor_argument(name, value):
    one, other = params_of((6, 4)), params_of((6, 4))
    left = run(MARS([{"params": one, name: value}]), one)
    right = run(MARS(other, **{name: value}), other)
    plain = params_of((6, 4))
    torch.testing.assert_close(left[0], right[0], rtol=0, atol=0)
    assert not torch.equal(left[0], run(MARS(plain), plain)[0]), f"{name} changes nothing"


def test_two_groups_with_different_rules_and_gammas():
    params = params_of((6, 4), (6, 4))
    optimizer = MARS([{"params": params[:1], "gamma": 0.1}, {"params": params[1:], "mars_type": "mars-lion"}])
    assert [(g["rule"], g["gamma"]) for g in optimizer.param_groups] == [("mars-adamw", 0.1), ("mars-lion", 0.025)]
    alone = params_of((6, 4), (6, 4))
    run(optimizer, params)
    for t in range(4):
        for p, g in zip(alone, grads_of(alone, t)):
            p.grad = g
        if t == 0:
            first, second = MARS(alone[:1], gamma=0.1), MARS(alone[1:], mars_type="mars-lion")
        first.step()
        second.step()
    for a, b in zip(params, alone):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_hyperparameters_survive_the_state_dict(rule):
    """Resume uses the saved values and continues bit for bit, loaded with weights_only=True."""
    straight = params_of((6, 4), (4,), (3, 2, 2, 2))
    kwargs = {"gamma": 0.1, "eps": 1e-6, "clip_c": 0.5, "lr": 1e-2, "lr_1d": 2e-3, "weight_decay": 0.2}
    expected = run(by_rule(straight, rule, **kwargs), straight, steps=6)

    params = params_of((6, 4), (4,), (3, 2, 2, 2))
    optimizer = by_rule(params, rule, **kwargs)
    run(optimizer, params, steps=3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = by_rule(params, rule)  # other hyperparameters: the saved ones must win
    resumed.load_state_dict(torch.load(file, weights_only=True))
    after = run(resumed, params, steps=3, first=3)
    for a, b in zip(expected, after):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_checkpoint_without_group_ids_goes_on():
    """Checkpoints of the first version have none."""
    params = params_of((4, 3), (3,))
    optimizer = MARS(params)
    run(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["group_id"]
        group["ns_dtype"] = torch.bfloat16
    resumed_params = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = MARS(resumed_params)
    resumed.load_state_dict(saved)
    expected = run(optimizer, params, first=4)
    assert_close(run(resumed, resumed_params, first=4), expected, rtol=0, atol=0)


def test_lr_of_vectors_follows_its_own_schedule_from_zero():
    """A warm-up that starts at lr = 0 must divide nothing, and the ratio of the two rates stays lr_1d / lr."""
    params = params_of((6, 4), (4,))
    optimizer = MARS(params, lr=6e-3, lr_1d=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 3))
    before = [p.detach().clone() for p in params]
    rates = []
    for t in range(5):
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        run(optimizer, params, steps=1, first=t)
        if t == 0:
            for p, q in zip(params, before):
                torch.testing.assert_close(p.detach(), q, rtol=0, atol=0)
        schedule.step()
    assert rates[0] == (0.0, 0.0)
    assert rates[3:] == [(6e-3, 3e-3)] * 2
    assert all(torch.isfinite(p).all() for p in params)


@pytest.mark.parametrize("lr_1d", [2e-3, None])
def test_one_lr_written_into_every_group_is_reported(lr_1d):
    params = params_of((6, 4), (4,))
    optimizer = MARS(params, lr=6e-3, lr_1d=lr_1d)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    with pytest.warns(UserWarning, match="scale each group's own lr"):
        run(optimizer, params, steps=1)


@pytest.mark.parametrize("rule", RULES)
def test_equal_learning_rates_that_were_asked_for_are_not_reported(rule, recwarn):
    params = params_of((6, 4), (4,))
    run(by_rule(params, rule, lr=6e-3, lr_1d=6e-3), params, steps=1)
    run(MARS(params, optimize_1d=True, lr=6e-3, lr_1d=3e-3), params, steps=1)
    assert not recwarn.list


@pytest.mark.parametrize("rule", [*RULES, "adamw", "muon", "moonlight"])
def test_parameter_without_gradient_is_skipped_and_counts_its_own_steps(rule):
    params, alone = params_of((6, 4), (5, 3), (4,)), params_of((6, 4), (5, 3), (4,))[1:2]
    optimizer = by_rule(params, rule)
    for t in range(5):
        for i, (p, g) in enumerate(zip(params, grads_of(params, t))):
            p.grad = None if i == 1 and t < 2 else g
        optimizer.step()
        if t < 2:
            torch.testing.assert_close(params[1].detach(), alone[0].detach(), rtol=0, atol=0)
            assert params[1] not in optimizer.state
    other = by_rule(alone, rule)
    for t in range(2, 5):
        alone[0].grad = grads_of(params, t)[1]
        other.step()
    torch.testing.assert_close(params[1].detach(), alone[0].detach(), rtol=1e-6, atol=1e-7)


def test_no_gradient_at_all_is_no_error():
    params = params_of((6, 4), (4,))
    optimizer = MARS(params)
    optimizer.step()
    assert not optimizer.state


def test_state_holds_tensors_only_and_groups_hold_the_routing():
    params = params_of((6, 4), (4,))
    optimizer = MARS(params)
    run(optimizer, params)
    for p in params:
        assert all(isinstance(value, torch.Tensor) for value in optimizer.state[p].values())
    assert [group["rule"] for group in optimizer.param_groups] == ["mars-adamw", "adamw"]
    for group in optimizer.param_groups:
        assert not {"mars_type", "lr_1d", "betas_1d", "weight_decay_1d"} & set(group)


def test_parameter_flattened_after_routing_is_refused():
    """FSDP1 and ZeRO put a flat vector where the matrices were; the update must not become another rule."""
    optimizer = MARS(params_of((6, 4)))
    flat = nn.Parameter(torch.zeros(24))
    flat.grad = torch.ones(24)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(ValueError, match=r"shape \(24,\)\) is no matrix.*ZeRO"):
        optimizer.step()
    torch.testing.assert_close(flat.detach(), torch.zeros(24))


@pytest.mark.parametrize("mars_type", [*RULES, "muon", "moonlight"])
def test_nothing_left_for_the_rule_is_an_error(mars_type):
    with pytest.raises(ValueError, match=f"nothing is left for mars_type='{mars_type}'"):
        MARS(params_of((4,), ()), mars_type=mars_type)


@pytest.mark.parametrize("rule", [*RULES, "muon", "moonlight"])
@pytest.mark.parametrize("set_transposed", [True, False])
def test_conv1d_gets_the_update_of_the_linear_it_transposes(rule, set_transposed):
    """Without `transposed`, MARS-Shampoo's update of a wide layer is sqrt(out / in) too small."""
    linear, conv1d = params_of((6, 2)), [nn.Parameter(params_of((6, 2))[0].detach().T.contiguous())]
    left = MARS([{"params": linear, "rule": rule}], mars_type=rule, ns_dtype=torch.float32)
    right = MARS(
        [{"params": conv1d, "rule": rule, "transposed": set_transposed}], mars_type=rule, ns_dtype=torch.float32
    )
    for t in range(3):
        linear[0].grad = grads_of(linear, t)[0]
        conv1d[0].grad = linear[0].grad.T.contiguous()
        left.step()
        right.step()
    differ = rule in ("mars-shampoo", "muon") and not set_transposed
    assert torch.allclose(linear[0], conv1d[0].T, rtol=0, atol=1e-6) != differ


def test_convolution_kernels_are_matrices_and_scalars_are_not():
    params = params_of((3, 2, 2, 2), (5,), ())
    for rule in RULES:
        optimizer = by_rule([p.detach().clone().requires_grad_() for p in params], rule)
        assert [[p.ndim for p in g["params"]] for g in optimizer.param_groups] == [[4], [1, 0]]
    kernel, flat = params_of((3, 2, 2, 2)), [nn.Parameter(params_of((3, 2, 2, 2))[0].detach().reshape(3, 8))]
    left, right = by_rule(kernel, "mars-m"), by_rule(flat, "mars-m")
    for t in range(3):
        kernel[0].grad = grads_of(kernel, t)[0]
        flat[0].grad = kernel[0].grad.reshape(3, 8)
        left.step()
        right.step()
    torch.testing.assert_close(kernel[0].detach().reshape(3, 8), flat[0].detach(), rtol=0, atol=0)


def test_sparse_gradient_is_refused_by_name_before_anything_changes():
    embedding, linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)
    model = nn.ModuleDict({"embedding": embedding, "linear": linear})
    optimizer = MARS(model.named_parameters())
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = linear.weight.detach().clone()
    with pytest.raises(ValueError, match=r"'embedding.weight'.*sparse=False"):
        optimizer.step()
    torch.testing.assert_close(linear.weight.detach(), before, rtol=0, atol=0)
    assert not optimizer.state
    with pytest.raises(ValueError, match=r"'embedding'.*sparse=False"):
        mars_param_groups(model, lr=1e-3)


def test_complex_parameter_is_refused_by_name():
    weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'weight'.*complex"):
        MARS([("weight", weight)])
    module = nn.Module()
    module.register_parameter("rotation", weight)
    with pytest.raises(ValueError, match=r"'rotation'.*complex"):
        mars_param_groups(module, lr=1e-3)


@pytest.mark.parametrize("rule", [*RULES, "adamw"])
def test_pieces_and_whole_tensors_agree(rule, monkeypatch):
    """Tensors are cut into pieces: the norm is still that of the whole, no tail is dropped, one step is one step."""
    shapes = ((40, 33), (7, 5), (129,), (31, 3, 3), (1, 1))
    whole = params_of(*shapes)
    kwargs = {"optimize_1d": True} if rule == "mars-adamw" else {}
    build = (lambda p: MARS(p, mars_type=rule, **kwargs)) if kwargs or rule == "adamw" else lambda p: by_rule(p, rule)
    expected = run(build(whole), whole)
    monkeypatch.setattr("mars_hf.optim.apply.CPU_CHUNK_BYTES", 400)
    cut = params_of(*shapes)
    optimizer = build(cut)
    got = run(optimizer, cut)
    for a, b, shape in zip(expected, got, shapes):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6, msg=lambda m, shape=shape: f"{shape}: {m}")
    assert {float(s["step"]) for s in optimizer.state.values() if "step" in s} <= {4.0}


@pytest.mark.parametrize("rule", [*RULES, "adamw", "moonlight"])
def test_memory_layout_does_not_change_the_update(rule):
    """A transposed parameter and a gradient with other strides than its parameter."""
    plain = params_of((6, 4), (6, 4))
    strided = [nn.Parameter(params_of((6, 4))[0].detach().T.contiguous().T), params_of((6, 4), (6, 4))[1]]
    assert not strided[0].is_contiguous()
    left, right = by_rule(plain, rule), by_rule(strided, rule)
    for t in range(3):
        grads = grads_of(plain, t)
        for p, q, g in zip(plain, strided, grads):
            p.grad = g.clone()
            q.grad = g.clone() if q is strided[0] else g.T.contiguous().T
        left.step()
        right.step()
    for p, q in zip(plain, strided):
        torch.testing.assert_close(q.detach().contiguous(), p.detach(), rtol=1e-6, atol=1e-6)


def test_exact_mode_in_the_wrong_order_is_a_clear_error():
    params = params_of((6, 4), (4,))

    def fresh():
        optimizer = MARS(params, is_approx=False)
        for p, g in zip(params, grads_of(params, 0)):
            p.grad = g
        return optimizer

    optimizer = fresh()
    with pytest.raises(ValueError, match="update_last_grad"):
        optimizer.update_last_grad()
    optimizer.step()
    with pytest.raises(ValueError, match="no reference gradient"):
        optimizer.step()
    with pytest.raises(ValueError, match="call update_last_grad"):
        optimizer.update_previous_grad()
    optimizer.update_last_grad()
    with pytest.raises(ValueError, match="no reference gradient"):
        optimizer.step()

    optimizer = fresh()
    for _ in range(2):
        optimizer.update_previous_grad()
        optimizer.step()
        optimizer.update_last_grad()


def test_look_ahead_without_any_gradient_is_an_error():
    """As where zero_grad() came too early, or an engine keeps gradients to itself; h would be 0 without a word."""
    params = params_of((4, 3))
    optimizer = MARS(params, is_approx=False)
    with pytest.raises(ValueError, match="found no gradient"):
        optimizer.update_previous_grad()
    assert not optimizer.state


def test_exact_mode_resumes_bit_for_bit():
    def loop(optimizer, params, first, last):
        for t in range(first, last):
            for p, g in zip(params, grads_of(params, 100 + t)):
                p.grad = g
            optimizer.update_previous_grad()
            for p, g in zip(params, grads_of(params, t)):
                p.grad = g
            optimizer.step()
            optimizer.update_last_grad()

    straight = params_of((6, 4), (4,))
    loop(MARS(straight, is_approx=False), straight, 0, 6)
    params = params_of((6, 4), (4,))
    optimizer = MARS(params, is_approx=False)
    loop(optimizer, params, 0, 3)
    resumed = MARS(params, is_approx=False)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loop(resumed, params, 3, 6)
    for a, b in zip(straight, params):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.parametrize("first_reached", [True, False])
def test_exact_mode_parameter_without_look_ahead_gradient_has_no_reference(first_reached):
    """A parameter that the look-ahead did not reach must not use the reference of an older batch, nor the used one."""
    params = params_of((6, 4), (6, 4))
    optimizer = MARS(params, is_approx=False)
    for reached in (first_reached, False):
        for p, g in zip(params, grads_of(params, 9)):
            p.grad = g
        if not reached:
            params[1].grad = None
        optimizer.update_previous_grad()
        for p, g in zip(params, grads_of(params, 1)):
            p.grad = g
        optimizer.step()
        optimizer.update_last_grad()
    torch.testing.assert_close(optimizer.state[params[1]]["last_grad"], torch.zeros(6, 4))
    assert optimizer.state[params[0]]["last_grad"].abs().sum() > 0


@pytest.mark.parametrize("is_approx", [True, False])
def test_step_skipped_by_a_grad_scaler_leaves_the_state_alone(is_approx):
    """An overflow at step 2: the parameters and h stay, and training goes on finite."""
    params = params_of((6, 4), (4,))
    optimizer = MARS(params, is_approx=is_approx)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(5):
        for p, g in zip(params, grads_of(params, 50 + t)):
            p.grad = g * (float("inf") if t == 1 else 1.0)  # the look-ahead of step 2 overflows as well
        optimizer.update_previous_grad()
        optimizer.zero_grad()
        for p, g in zip(params, grads_of(params, t)):
            p.grad = scaler.scale(g) * (float("inf") if t == 2 else 1.0)
        before = [p.detach().clone() for p in params]
        state = copy.deepcopy(optimizer.state_dict()["state"])
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if t == 2:
            for p, q in zip(params, before):
                torch.testing.assert_close(p.detach(), q, rtol=0, atol=0)
            for i, tensors in optimizer.state_dict()["state"].items():
                for name, tensor in tensors.items():
                    torch.testing.assert_close(tensor, state[i][name], rtol=0, atol=0)
        optimizer.update_last_grad()
        optimizer.zero_grad()
        assert all(torch.isfinite(p).all() for p in params), f"not finite after step {t}"
    assert all(torch.isfinite(v).all() for s in optimizer.state.values() for v in s.values())


def test_clip_is_per_whole_tensor_and_without_effect_below_the_threshold():
    large, small = params_of((6, 4)), params_of((6, 4))
    clipped, free = MARS(large, clip_c=1.0, gamma=0.0, betas=(0.0, 0.0)), MARS(small, clip_c=None, gamma=0.0)
    large[0].grad = torch.full((6, 4), 3.0)
    clipped.step()
    c = clipped.state[large[0]]["exp_avg"]
    torch.testing.assert_close(c.norm(), torch.tensor(1.0))
    small[0].grad = torch.full((6, 4), 3.0)
    free.step()
    torch.testing.assert_close(free.state[small[0]]["exp_avg"], torch.full((6, 4), 3.0 * 0.05))


@pytest.mark.parametrize("rule", RULES)
def test_shortcut_around_the_clip_changes_nothing(rule, monkeypatch):
    """Gradients on both sides of the threshold; the pass over c is saved only where it cannot matter."""
    shapes = [(6, 4), (5, 3), (7, 2)]

    def trained(always_measure):
        params = params_of(*shapes)
        optimizer = by_rule(params, rule)
        measured = []
        with monkeypatch.context() as patch:
            if always_measure:
                patch.setattr(NormBounds, "watched", lambda *args: {})
            else:
                original = NormBounds.watched

                def watched(self, grads, last_grads, hyper):
                    found = original(self, grads, last_grads, hyper)
                    measured.append([h not in found for h in last_grads])
                    return found

                patch.setattr(NormBounds, "watched", watched)
            for t in range(9):
                for p, g, scale in zip(params, grads_of(params, t), (0.01, 0.15, 3.0)):
                    p.grad = g * scale
                if t == 5:  # someone else writes h: what was known of it no longer holds
                    optimizer.state[params[0]]["last_grad"].fill_(10.0)
                optimizer.step()
        return [p.detach() for p in params], measured

    expected, _ = trained(always_measure=True)
    got, measured = trained(always_measure=False)
    assert ["FT"[row[0]] for row in measured] == list("TFFFFTTFF")
    assert all(row[2] for row in measured)
    for a, b in zip(expected, got):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_exact_mode_goes_on_when_a_group_is_added_between_its_calls():
    params = params_of((6, 4), (6, 4))
    optimizer = MARS(params[:1], is_approx=False)
    for t in range(4):
        for p, g in zip(params, grads_of(params, t)):
            p.grad = g
        optimizer.update_previous_grad()
        if t == 1:
            optimizer.add_param_group({"params": params[1:]})
        optimizer.step()
        optimizer.update_last_grad()


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("rule", ["mars-shampoo", "mars-m", "muon", "moonlight"])
def test_matrices_of_one_shape_do_not_mix(rule, one_by_one, monkeypatch):
    """Equal shapes are orthogonalised in one batch, here in two, if not one by one; each comes out as if alone."""
    if one_by_one:
        monkeypatch.setattr("mars_hf.optim.rules.NS_ALONE", 24)
    together = params_of(*[(6, 4)] * 5)
    monkeypatch.setattr("mars_hf.optim.sharding.base.STACK_ELEMENTS", 3 * 24)
    scales = [1e-3, 1.0, 50.0, 0.3, 7.0]
    optimizer = by_rule(together, rule, ns_dtype=torch.float32)
    alone = [[p.detach().clone().requires_grad_()] for p in together]
    optimizers = [by_rule(p, rule, ns_dtype=torch.float32) for p in alone]
    for t in range(3):
        for p, single, own, g, scale in zip(together, alone, optimizers, grads_of(together, t), scales):
            p.grad = scale * g
            single[0].grad = scale * g
            own.step()
        optimizer.step()
    for p, single in zip(together, alone):
        torch.testing.assert_close(p, single[0], rtol=0, atol=1e-6)


def test_shampoo_adds_eps_to_the_norm_of_the_corrected_momentum():
    """NS5(m / (1 - beta1)) by hand, with an eps that matters."""
    p = params_of((6, 4))[0]
    before = p.detach().clone()
    eps, beta1, gamma, lr = 0.5, 0.95, 0.025, 0.1
    optimizer = by_rule([p], "mars-shampoo", eps=eps, lr=lr, clip_c=None, ns_dtype=torch.float32)
    p.grad = grads_of([p], 0)[0]
    optimizer.step()
    x = (1 + gamma * beta1 / (1 - beta1)) * p.grad
    x = (x / (x.norm() + eps)).T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    torch.testing.assert_close(p.detach(), before - lr * (6 / 4) ** 0.5 * x.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_norms_beyond_the_range_of_float16(rule):
    """A norm of 2^17 is infinite in float16, and would clip c to zero."""
    p = nn.Parameter(torch.zeros(64, 64, dtype=torch.float16))
    optimizer = by_rule([p], rule, lr=0.1, betas=(0.5, 0.5), gamma=0.0)
    p.grad = torch.full_like(p, 2048.0)
    optimizer.step()
    assert torch.isfinite(p).all()
    assert (p < -1e-4).all()


@pytest.mark.parametrize("rule", [*RULES, "adamw"])
def test_channels_last_after_the_first_steps(rule):
    """The memory format of parameters may change under the optimizer, by `model.to` or by loading."""
    plain, converted = params_of((4, 3, 2, 2)), params_of((4, 3, 2, 2))
    left, right = by_rule(plain, rule), by_rule(converted, rule)
    for t in range(4):
        if t == 2:
            converted[0].data = converted[0].data.to(memory_format=torch.channels_last)
        for p, q, g in zip(plain, converted, grads_of(plain, t)):
            p.grad, q.grad = g.clone(), g.clone()
        left.step()
        right.step()
    torch.testing.assert_close(converted[0].detach(), plain[0].detach(), rtol=1e-6, atol=1e-6)


def test_parameter_with_gaps_in_memory_is_refused():
    """torch's fused kernels would write into the gaps."""
    with pytest.raises(ValueError, match="gaps in memory"):
        MARS([nn.Parameter(torch.zeros(100)[::10].view(5, 2))])


def test_overflowed_look_ahead_means_no_reference():
    p = params_of((2, 2))[0]
    optimizer = MARS([p], is_approx=False)
    p.grad = torch.tensor([[1.0, float("inf")], [float("nan"), -float("inf")]])
    optimizer.update_previous_grad()
    p.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.update_last_grad()
    torch.testing.assert_close(optimizer.state[p]["last_grad"], torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
