"""The memory that is counted before a run against the bytes that its tensors really have."""

import pytest
import torch
from tiny import arguments, gpt2, train

from mars_hf import MARS, mars_param_groups
from mars_hf.training.memory import run_memory

LAST_GRAD_BF16 = {"mars_last_grad_dtype": "bfloat16"}
EFFICIENT = {"mars_memory_efficient": True, "mars_clip_c": 0.0}
EXACT = {"is_approx": False}
# mars_type, options: state in multiples of the matrices it updates, and of what AdamW updates beside them.
TARGETS = {
    "mars-adamw": ({}, 3, 2),
    "mars-adamw, h in bfloat16": (LAST_GRAD_BF16, 2.5, 2),
    "mars-adamw, exact": (EXACT, 4, 3),
    "mars-adamw, amsgrad": ({"mars_amsgrad": True}, 4, 3),
    "mars-lion": ({}, 2, 2),
    "mars-lion, memory-efficient": (EFFICIENT, 1, 2),
    "mars-lion, exact": (EXACT, 3, 3),
    "mars-shampoo": ({}, 2, 2),
    "mars-shampoo, memory-efficient": (EFFICIENT, 1, 2),
    "mars-m": ({}, 2, 2),
    "mars-m, h in bfloat16": (LAST_GRAD_BF16, 1.5, 2),
    "mars-m, memory-efficient": (EFFICIENT, 1, 2),
    "mars-m, exact": (EXACT, 3, 3),
    "adamw": ({}, None, 2),
    "muon": ({"lr_1d": 1e-3}, 1, 2),
    "moonlight": ({}, 1, 2),
}


def allocated(tensors):
    """Bytes of the memory behind tensors, shared memory counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", TARGETS)
def test_state_is_as_large_as_the_table_says_and_the_estimate_counts_it(tmp_path, name):
    options, matrix_target, vector_target = TARGETS[name]
    options = {"optim": "mars", "mars_type": name.split(",")[0], "mars_ns_steps": 1, "max_steps": 2, **options}
    trainer = train(arguments(tmp_path, **options))
    optimizer = trainer.optimizer.optimizer
    measured = dict.fromkeys((group["rule"] for group in optimizer.param_groups), 0)
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"]]
        measured[group["rule"]] += allocated(t for state in states for t in state.values())
        target = vector_target if group["rule"] == "adamw" else matrix_target
        tensors = [t for state in states for key, t in state.items() if key != "step"]
        assert allocated(tensors) == target * allocated(group["params"]), f"{name}: multiples of its {group['rule']}"
    memory = run_memory(trainer.model, optimizer.param_groups, engine="single", dtype=torch.float32, processes=1)
    assert memory.states == measured, f"{name}: bytes of state by rule"
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    weights = allocated(trainer.model.parameters())
    expected = (weights, allocated(trained), weights + allocated(trained) + sum(measured.values()))
    assert (memory.parameters, memory.gradients, memory.total) == expected, f"{name}: weights, gradients, together"


def test_frozen_weights_have_neither_gradient_nor_state():
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    groups = MARS(mars_param_groups(model, lr=1e-3), lr=1e-3).param_groups
    memory = run_memory(model, groups, engine="single", dtype=torch.float32, processes=1)
    assert memory.parameters - memory.gradients == allocated([model.transformer.wte.weight])


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_the_largest_share_counts(engine):
    """FSDP2 cuts 5 rows of 4 into 3, 2, so it counts 12 elements; ZeRO cuts 20 elements into 10, 10."""
    model = torch.nn.Linear(4, 5, bias=False)
    groups = MARS(model.parameters(), lr=1e-3).param_groups
    memory = run_memory(model, groups, engine=engine, dtype=torch.float32, processes=2)
    assert memory.states == {"mars-adamw": 3 * 4 * (12 if engine == "fsdp2" else 10) + 4}


def test_a_checkpoint_is_as_large_as_weights_and_state(tmp_path):
    """Which is what --dry_run counts on; both files have headers of their own, some kilobytes here."""
    trainer = train(arguments(tmp_path, optim="mars", max_steps=1, save_strategy="steps", save_steps=1))
    groups = trainer.optimizer.optimizer.param_groups
    memory = run_memory(trainer.model, groups, engine="single", dtype=torch.float32, processes=1)
    model, state = (tmp_path / "checkpoint-1" / name for name in ("model.safetensors", "optimizer.pt"))
    assert 0 <= model.stat().st_size - memory.parameters < 8_000, "bytes of model.safetensors"
    # torch.save aligns every tensor to 64 bytes, and adds a name and a checksum.
    assert 0 <= state.stat().st_size - sum(memory.states.values()) < 500 * 4 * len(trainer.optimizer.state), "state"


@pytest.mark.parametrize(
    ("engine", "processes", "message"),
    [
        ("zero4", 2, "engine='zero4' is unknown: did you mean 'zero"),
        ("single", 2, "processes=2: engine='single' takes 1"),
        ("ddp", 0, "processes=0: engine='ddp' takes 1 or more"),
    ],
)
def test_errors(engine, processes, message):
    with pytest.raises(ValueError, match=message):
        run_memory(gpt2(), [], engine=engine, dtype=torch.float32, processes=processes)
