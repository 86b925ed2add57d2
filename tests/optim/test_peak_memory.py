"""The temporaries of a step: bounded by a chunk, or by a round of Newton-Schulz work, however large the model is."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mars_hf import MARS
from mars_hf.optim import chunks
from mars_hf.optim.sharding import base

# 20 MiB of matrices, and a few vectors.
SHAPES = [(256, 256)] * 64 + [(256, 4096)] + [(1000,)] * 4
MIB = 2**20
CHUNK = chunks.CPU_CHUNK_BYTES
# What Newton-Schulz works on at once here: the largest matrix, or sixteen of the others.
ROUND = 4 * 2**20

# rule, options: what a step may take beside weights, gradients and state.
ELEMENTWISE = {
    "mars-adamw": ({}, 0),
    "mars-adamw, h in bfloat16": ({"last_grad_dtype": torch.bfloat16}, 2 * CHUNK),  # h and c in float32
    "mars-adamw, amsgrad": ({"amsgrad": True}, 0),
    "mars-adamw, exact": ({"is_approx": False}, 0),
    "mars-lion": ({}, CHUNK),  # the signs
    "mars-lion, memory-efficient": ({"memory_efficient": True, "clip_c": None}, 2 * CHUNK),  # the momentum, its signs
    "adamw": ({}, 0),
}
MATRICES = {
    "mars-shampoo": ({}, 2.5 * ROUND),
    "mars-m": ({}, 2.5 * ROUND),
    "mars-m, memory-efficient": ({"memory_efficient": True, "clip_c": None}, 3.5 * ROUND),  # the momentum too
    "muon": ({}, 3.5 * ROUND),
    "moonlight": ({}, 3.5 * ROUND),
}


def allocations(events):
    """(time, bytes in use after it, its size) of every allocation and release."""
    for event in events:
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            yield event.start_time_ns, fields.total_allocated, fields.alloc_size
        yield from allocations(event.children)


def temporaries(optimizer):
    """Most bytes that one step has in use beside what it began with; torch counts every allocation on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        optimizer.step()
    _, totals, sizes = zip(*sorted(allocations(recorded.profiler.kineto_results.experimental_event_tree())))
    return max(totals) - (totals[0] - sizes[0])


def peak(name, options):
    """The temporaries of the second step; the first one creates the state."""
    rule = name.split(",")[0]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    matrices, vectors = ([p for p in params if (p.dim() == 2) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "rule": rule}, {"params": vectors, "rule": "adamw"}]
    optimizer = MARS(groups, mars_type=rule, ns_steps=1, **options)
    for p in params:
        p.grad = torch.full_like(p, 0.1)
    optimizer.update_previous_grad()
    optimizer.step()
    optimizer.update_last_grad()
    optimizer.update_previous_grad()
    return temporaries(optimizer)


def test_what_a_step_allocates_is_seen():
    """Of a first step, which creates three tensors of state for each matrix and two for each vector."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for p in params:
        p.grad = torch.full_like(p, 0.1)
    state = 4 * (3 * 80 * 2**16 + 2 * 4000)
    assert state <= temporaries(MARS(params)) <= state + 64_000, "bytes of the state"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rules_take_at_most_two_chunks(name):
    options, bound = ELEMENTWISE[name]
    taken = peak(name, options)
    # Step counts, norms and factors: a few bytes a tensor.
    assert taken <= bound + 64_000, f"{name}: {taken / MIB:.2f} MiB, allowed {bound / MIB:.2f}"


@pytest.mark.parametrize("name", ["mars-adamw", "mars-adamw, h in bfloat16", "mars-lion"])
def test_the_compiled_pass_takes_nothing(compiles, name):
    taken = peak(name, {**ELEMENTWISE[name][0], "fused": True})
    assert taken <= 64_000, f"{name}, fused: {taken / MIB:.2f} MiB"


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_rules_take_a_few_times_a_round(monkeypatch, name):
    """Momenta and stacks of one round, its half-precision copies and products; not a second copy of the model."""
    monkeypatch.setattr(base, "STACK_ELEMENTS", ROUND // 4)
    options, bound = MATRICES[name]
    taken = peak(name, options)
    assert taken <= bound + 64_000, f"{name}: {taken / MIB:.2f} MiB, allowed {bound / MIB:.2f}"
