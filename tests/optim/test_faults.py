"""Faults seen in public implementations of MARS, each of which must stay out (those that one process can show)."""

import copy
import io

import pytest
import torch
from optim_cases import MARS_RULES, by_rule, grads_of, params_of, run
from torch import nn
from torch.testing import assert_close

from mars_hf import MARS, mars_param_groups


@pytest.mark.parametrize("rule", MARS_RULES)
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


@pytest.mark.parametrize("rule", MARS_RULES)
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


@pytest.mark.parametrize("rule", MARS_RULES)
def test_equal_learning_rates_that_were_asked_for_are_not_reported(rule, recwarn):
    params = params_of((6, 4), (4,))
    run(by_rule(params, rule, lr=6e-3, lr_1d=6e-3), params, steps=1)
    run(MARS(params, optimize_1d=True, lr=6e-3, lr_1d=3e-3), params, steps=1)
    assert not recwarn.list


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


@pytest.mark.parametrize("mars_type", [*MARS_RULES, "muon", "moonlight"])
def test_nothing_left_for_the_rule_is_an_error(mars_type):
    with pytest.raises(ValueError, match=f"nothing is left for mars_type='{mars_type}'"):
        MARS(params_of((4,), ()), mars_type=mars_type)


@pytest.mark.parametrize("rule", [*MARS_RULES, "muon", "moonlight"])
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
    for rule in MARS_RULES:
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


@pytest.mark.parametrize("rule", MARS_RULES)
def test_norms_beyond_the_range_of_float16(rule):
    """A norm of 2^17 is infinite in float16, and would clip c to zero."""
    p = nn.Parameter(torch.zeros(64, 64, dtype=torch.float16))
    optimizer = by_rule([p], rule, lr=0.1, betas=(0.5, 0.5), gamma=0.0)
    p.grad = torch.full_like(p, 2048.0)
    optimizer.step()
    assert torch.isfinite(p).all()
    assert (p < -1e-4).all()


@pytest.mark.parametrize("rule", [*MARS_RULES, "adamw"])
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
