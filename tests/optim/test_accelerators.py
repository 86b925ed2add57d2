"""The step on accelerators: it must never wait for the device. Without a GPU, shown on tensors that have no values."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from mars_hf import MARS
from mars_hf.optim.rules import MARS_RULES, RULES

SHAPES = [(64, 32), (64, 32), (32,)]
OPTIONS = [{}, {"clip_c": None}, {"last_grad_dtype": torch.bfloat16}]
CASES = [(rule, options) for rule in RULES for options in OPTIONS if not options or rule in MARS_RULES]


def optimizer_of(params, rule, options):
    groups = [{"params": params[:2], "rule": rule}, {"params": params[2:], "rule": "adamw"}]
    return MARS(groups, mars_type=rule, ns_dtype=torch.float32, **options)


@pytest.mark.parametrize("rule, options", CASES)
def test_no_value_is_read_on_the_host(rule, options):
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
        optimizer = optimizer_of(params, rule, options)
        for _ in range(3):
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()
        with pytest.raises(DataDependentOutputException):
            torch.zeros((), device="cuda").item()  # what a step that waits would run into


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule, options", CASES)
def test_a_gpu_gives_what_the_cpu_gives_without_waiting(rule, options):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    outcomes = []
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(value.clone().to(device)) for value in values]
        optimizer = optimizer_of(params, rule, options)
        for t in range(3):
            for p, value in zip(params, values):
                p.grad = ((t + 1) * value.flip(0)).to(device)
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        outcomes.append([p.detach().cpu() for p in params])
    for cpu, gpu in zip(*outcomes):
        torch.testing.assert_close(gpu, cpu, rtol=1e-5, atol=1e-5)
