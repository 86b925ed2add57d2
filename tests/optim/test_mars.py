"""The optimizer as a torch.optim.Optimizer: arguments, state, dtypes, closures, loading."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from mars_hf import MARS

ALL = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon", "moonlight"]


def model_and_groups(rule, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    params = [nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in [(6, 4), (4,)]]
    groups = [{"params": params[:1], "rule": rule}, {"params": params[1:], "rule": "adamw"}]
    return params, MARS(groups, mars_type=rule, **kwargs)


def step(params, optimizer, seed=0):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn_like(p) * 0.1
    optimizer.step()


ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}
STATES = {
    "mars-adamw": {*ADAMW_STATE, "last_grad"},
    "mars-lion": {"exp_avg", "last_grad"},
    "mars-shampoo": {"exp_avg", "last_grad"},
    "mars-m": {"exp_avg", "last_grad"},
    "adamw": ADAMW_STATE,
    "muon": {"exp_avg"},
    "moonlight": {"exp_avg"},
}


@pytest.mark.parametrize("rule", ALL)
def test_only_the_state_that_the_rule_needs(rule):
    params, optimizer = model_and_groups(rule)
    step(params, optimizer)
    assert set(optimizer.state[params[0]]) == STATES[rule]
    assert set(optimizer.state[params[1]]) == ADAMW_STATE


@pytest.mark.parametrize("rule", ["mars-lion", "mars-shampoo", "mars-m"])
def test_memory_efficient_keeps_one_tensor(rule):
    params, optimizer = model_and_groups(rule, memory_efficient=True, clip_c=None)
    step(params, optimizer)
    assert set(optimizer.state[params[0]]) == {"exp_avg"}


def test_amsgrad_and_exact_add_one_tensor_each():
    params, optimizer = model_and_groups("mars-adamw", amsgrad=True, is_approx=False)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()
    assert set(optimizer.state[params[0]]) == STATES["mars-adamw"] | {"max_exp_avg_sq", "previous_grad"}
    assert set(optimizer.state[params[1]]) == ADAMW_STATE | {"max_exp_avg_sq"}


def test_vectors_follow_optimize_1d():
    params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))]
    optimizer = MARS(params, mars_type="mars-shampoo", optimize_1d=True, lr=1e-2, weight_decay=0.3)
    assert [(g["rule"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("mars-shampoo", 1e-2, 0.3),
        ("mars-adamw", 1e-2, 0.3),
    ]
    only_vectors = MARS(params[1:], optimize_1d=True)
    assert [g["rule"] for g in only_vectors.param_groups] == ["mars-adamw"]


@pytest.mark.parametrize(
    ("mars_type", "expected"),
    [
        ("mars-adamw", (3e-3, (0.9, 0.95), 0.1)),
        ("muon", (3e-3, (0.9, 0.95), 0.1)),
        ("mars-m", (7e-3, (0.9, 0.95), 0.02)),
        ("moonlight", (7e-3, (0.9, 0.95), 0.02)),
        ("adamw", (7e-3, (0.8, 0.9), 0.02)),
    ],
)
@pytest.mark.filterwarnings("ignore:mars_type")
def test_defaults_of_adamw_ruled_parameters(mars_type, expected):
    params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))]
    optimizer = MARS(params, lr=7e-3, betas=(0.8, 0.9), weight_decay=0.02, mars_type=mars_type)
    group = optimizer.param_groups[1]
    assert (group["lr"], group["betas"], group["weight_decay"]) == expected


@pytest.mark.parametrize("mars_type", ["mars-m", "muon", "moonlight"])
def test_plain_parameters_of_an_orthogonalising_rule_warn(mars_type):
    with pytest.warns(UserWarning, match="mars_param_groups"):
        MARS([nn.Parameter(torch.ones(3, 3))], mars_type=mars_type)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": torch.tensor(1e-3)}, "no tensor"),
        ({"lr": "1e-3"}, "lr='1e-3'"),
        ({"lr": True}, "lr=True"),
        ({"lr_1d": -1.0}, "lr_1d=-1.0"),
        ({"weight_decay_1d": -1.0}, "weight_decay_1d=-1.0"),
        ({"betas_1d": 0.9}, "betas_1d=0.9"),
        ({"betas": None}, "betas=None"),
        ({"gamma": None}, "gamma=None"),
        ({"clip_c": "1"}, "clip_c='1'"),
        ({"optimize_1d": "no"}, "optimize_1d='no'"),
        ({"ns_steps": True}, "ns_steps=True"),
        ({"ns_dtype": torch.float8_e4m3fn}, "ns_dtype=torch.float8_e4m3fn"),
        ({"is_approx": False, "mars_type": "muon"}, "is_approx=False belongs to MARS"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas="),
        ({"eps": -1e-8}, "eps="),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"gamma": -0.1}, "gamma=-0.1"),
        ({"mars_type": "mars-adam"}, "did you mean 'mars-adamw'"),
        ({"clip_c": 0.0}, "clip_c=0.0"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"ns_dtype": torch.int8}, "ns_dtype=torch.int8"),
        ({"last_grad_dtype": "bfloat16"}, "last_grad_dtype='bfloat16'"),
        ({"memory_efficient": True}, "memory_efficient=True is not exact for 'mars-adamw'"),
        ({"memory_efficient": True, "mars_type": "mars-lion"}, "pass clip_c=None"),
        ({"memory_efficient": True, "mars_type": "mars-lion", "clip_c": None, "is_approx": False}, "is_approx=True"),
        ({"memory_efficient": True, "mars_type": "adamw"}, "memory_efficient=True belongs to MARS"),
        ({"optimize_1d": True, "mars_type": "muon"}, "optimize_1d=True belongs to MARS"),
    ],
)
@pytest.mark.filterwarnings("ignore:mars_type")
def test_bad_argument_is_one_line_that_names_it(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        MARS([nn.Parameter(torch.ones(3, 3))], **arguments)
    assert "\n" not in str(error.value)


def test_bad_group_leaves_the_optimizer_as_it_was():
    optimizer = MARS([nn.Parameter(torch.ones(3, 3))])
    for bad in ({"rule": "mars-k"}, {"rule": "mars-m", "params": [nn.Parameter(torch.ones(3))]}, {"gamma": -1.0}):
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], **bad})
    assert len(optimizer.param_groups) == 1
    matrix, known = nn.Parameter(torch.ones(3, 3)), optimizer.param_groups[0]["params"][0]
    with pytest.raises(ValueError, match="in another param group"):
        optimizer.add_param_group({"params": [matrix, nn.Parameter(torch.ones(3)), known]})
    for wrong in ({matrix}, [matrix, 3]):
        with pytest.raises(TypeError, match="params"):
            optimizer.add_param_group({"params": wrong})
    assert len(optimizer.param_groups) == 1


def test_closure_named_parameters_deepcopy_and_pickle():
    model = nn.Linear(4, 3)
    optimizer = MARS(model.named_parameters(), lr=1e-2)
    assert [g["param_names"] for g in optimizer.param_groups] == [["weight"], ["bias"]]

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.add_param_group({"params": [("late", nn.Parameter(torch.ones(2, 2)))]})
        assert [g["rule"] for g in twin.param_groups] == ["mars-adamw", "adamw", "mars-adamw"]


def test_loading_puts_every_state_on_the_device_and_dtype_of_its_parameter():
    """A checkpoint read to the CPU, as the Trainer reads it, for parameters elsewhere; kernels need `step` there."""
    params, optimizer = model_and_groups("mars-adamw", last_grad_dtype=torch.bfloat16, is_approx=False)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()
    elsewhere = [nn.Parameter(p.detach().to("meta")) for p in params]
    groups = [{"params": elsewhere[:1], "rule": "mars-adamw"}, {"params": elsewhere[1:], "rule": "adamw"}]
    loaded = MARS(groups, is_approx=False)
    loaded.load_state_dict(optimizer.state_dict())
    for p in elsewhere:
        assert {name: t.device.type for name, t in loaded.state[p].items()} == dict.fromkeys(loaded.state[p], "meta")
    assert {loaded.state[elsewhere[0]][name].dtype for name in ("last_grad", "previous_grad")} == {torch.bfloat16}


def test_groups_with_another_lr_keep_the_ratio_of_the_two():
    params = [nn.Parameter(torch.ones(shape)) for shape in [(3, 3), (3,), (3, 3), (3,)]]
    optimizer = MARS([{"params": params[:2], "lr": 1e-5}, {"params": params[2:]}], lr=1e-3, lr_1d=5e-4)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-5, 5e-6, 1e-3, 5e-4])
    own = MARS([{"params": params, "lr": 1e-5, "lr_1d": 7e-4}], lr=1e-3)
    assert [g["lr"] for g in own.param_groups] == [1e-5, 7e-4]


def test_ready_groups_of_another_rule_are_named():
    group = {"params": [nn.Parameter(torch.ones(3, 3))], "rule": "moonlight"}
    with pytest.raises(ValueError, match=r"have only \['moonlight'\].*pass the mars_type they were built for"):
        MARS([group])


def test_empty_parameters_are_skipped():
    params = [nn.Parameter(torch.ones(3, 0)), nn.Parameter(torch.ones(3, 3))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = MARS([{"params": params, "rule": "mars-shampoo"}], mars_type="mars-shampoo")
    optimizer.step()
    assert list(optimizer.state) == params[1:]


def test_foreign_state_is_refused_and_nothing_is_loaded():
    params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))]
    optimizer = MARS(params)
    step(params, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    foreign = [torch.optim.AdamW(params), MARS(params, mars_type="mars-lion"), MARS(params, is_approx=False)]
    for other in foreign:
        with pytest.raises(ValueError, match="of the saved param groups"):
            optimizer.load_state_dict(other.state_dict())
    for i, tensors in optimizer.state_dict()["state"].items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, before["state"][i][name], rtol=0, atol=0)


def test_optimizer_imports_torch_alone():
    code = (
        "import sys; import torch; before = set(sys.modules); from mars_hf import MARS, mars_param_groups; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "bad = new & {'transformers', 'accelerate', 'datasets', 'lm_eval', 'evaluate', 'deepspeed', 'matplotlib'}; "
        "assert not bad, bad; assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
