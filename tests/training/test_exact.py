"""Exact mode in MARSTrainer: a loop written by hand, resume, what is logged, refusals."""

import random

import numpy as np
import pytest
import torch
from tiny import arguments, assert_same, gpt2, losses, rows, train, weights
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

import mars_hf
from mars_hf import MARS, MARSTrainer, mars_param_groups
from mars_hf.training.exact import ReferenceGradient


class Recorder(MARSTrainer):
    """Notes the micro-batches of each step and the random state in which the step begins."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = []
        recorder = self

        class States(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                batches = [batch["input_ids"].clone() for batch in recorder.micro_batches[0]]
                recorder.steps.append((batches, torch.get_rng_state()))

        self.add_callback(States())


def gradient(model, step):
    """The clipped gradient of the mean loss over the micro-batches of a recorded step, with its random state."""
    batches, rng = step
    torch.set_rng_state(rng)
    predicted = sum(batch[:, 1:].numel() for batch in batches)
    model.zero_grad()
    model.train()
    for batch in batches:
        model(input_ids=batch, labels=batch, num_items_in_batch=predicted).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def by_hand(steps, lrs, mars_type, dropout=0.0, optimize_1d=False):
    """The authors' loop, which differentiates the next batch at the current parameters."""
    model = gpt2(dropout)
    names = [n for n, _ in model.named_parameters() if "bias" not in n and "ln_" not in n]
    groups = mars_param_groups(
        model,
        lr=1e-2,
        mars_type=mars_type,
        weight_decay=0.01,
        optimize_1d=optimize_1d,
        lr_1d=4e-3,
        decay_names=names,
    )
    optimizer = MARS(groups, mars_type=mars_type, is_approx=False, ns_dtype=torch.float32)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for t, step in enumerate(steps):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * lrs[t] / 1e-2
        if t + 1 < len(steps):
            gradient(model, steps[t + 1])
            optimizer.update_previous_grad()
        gradient(model, step)
        optimizer.step()
        optimizer.update_last_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


# The schedule with a minimal learning rate divides by the learning rate.
CONSTANT = {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": None}

CASES = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dropout": 0.1},
    # 48 rows are 10 micro-batches of 5, that is 3 steps of 3 and one of 1 an epoch.
    "odd epochs": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3, "dropout": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "dropout": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "optimize_1d": {"optimize_1d": True},
}


RULES = ("mars_adamw", "mars_lion", "mars_shampoo", "mars_m")


@pytest.mark.parametrize(
    ("optim", "case"),
    [(optim, case) for optim in RULES for case in CASES if optim == "mars_adamw" or case in ("plain", "odd epochs")],
)
def test_equals_the_loop_of_the_authors(tmp_path, optim, case):
    options = dict(CASES[case])
    dropout = options.pop("dropout", 0.0)
    if optim == "mars_lion":
        options["max_steps"] = 6  # a sign turns a rounding error into a step
    args = arguments(tmp_path, is_approx=False, optim=optim, lr_1d=4e-3, **{"max_steps": 12, **options})
    trainer = train(args, gpt2(dropout), trainer_class=Recorder)
    lrs = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    expected = by_hand(trainer.steps, lrs, optim.replace("_", "-"), dropout, args.optimize_1d)
    assert_same(weights(trainer), expected, 1e-6 if optim in ("mars_adamw", "mars_lion") else 2e-5)
    # Not what approx mode does.
    approx = weights(train(arguments(tmp_path, optim=optim, lr_1d=4e-3, **options), gpt2(dropout)))
    assert max((approx[name] - expected[name]).abs().max() for name in expected) > 1e-4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows() * 3)


def test_iterable_dataset(tmp_path):
    args = arguments(tmp_path, is_approx=False, lr_1d=4e-3)
    trainer = Recorder(model=gpt2(), args=args, train_dataset=Stream())
    trainer.train()
    lrs = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert_same(weights(trainer), by_hand(trainer.steps, lrs, "mars-adamw"), 1e-6)


@pytest.mark.parametrize("optim", ["mars_adamw", "mars_m"])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_resume_is_exact_at_any_step(tmp_path, optim, at):
    def settings(folder, **more):
        kwargs = {"is_approx": False, "optim": optim, "per_device_train_batch_size": 5, "max_steps": 9}
        return arguments(tmp_path / folder, gradient_accumulation_steps=3, **kwargs, **more)

    saving = settings("run", save_strategy="steps", save_steps=at)
    straight = train(saving, gpt2(0.1))
    resumed = train(saving, gpt2(0.1), resume=str(tmp_path / "run" / f"checkpoint-{at}"))
    assert_same(weights(straight), weights(resumed))
    assert losses(straight)[at:] == losses(resumed)[at:]
    left, right = (t.optimizer.state_dict()["state"] for t in (straight, resumed))
    for i, state in left.items():
        for name, tensor in state.items():
            torch.testing.assert_close(right[i][name], tensor, rtol=0, atol=0, msg=f"{i} {name}")


def test_only_the_main_gradient_is_counted(tmp_path):
    events = []

    class Count(TrainerCallback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                events.append(name)
            return super().__getattribute__(name)

    kwargs = {"max_steps": 4, "include_num_input_tokens_seen": "all", "learning_rate": 0.0, **CONSTANT}
    runs = {}
    for is_approx in (True, False):
        events.clear()
        args = arguments(tmp_path, is_approx=is_approx, **kwargs)
        trainer = train(args, gpt2(0.1), callbacks=[Count()])
        runs[is_approx] = (trainer.state, list(events))
    (approx, approx_events), (exact, exact_events) = runs[True], runs[False]
    assert exact_events == approx_events
    # With lr 0 the parameters stay, so the losses, masks and all, are those of approx mode.
    assert [row.get("loss") for row in exact.log_history] == [row.get("loss") for row in approx.log_history]
    assert exact.num_input_tokens_seen == approx.num_input_tokens_seen
    assert exact.total_flos == approx.total_flos


def test_random_generators_and_buffers_are_left_alone(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)
            self.drawn = []

        def forward(self, x):
            self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
            return {"loss": self.out(self.norm(x)).square().mean()}

    data = [{"x": x} for x in torch.randn(64, 4, generator=torch.Generator().manual_seed(1))]
    runs = {}
    for is_approx in (True, False):
        args = arguments(tmp_path, is_approx=is_approx, max_steps=5, learning_rate=0.0, **CONSTANT)
        trainer = MARSTrainer(model=Noisy(), args=args, train_dataset=data)
        trainer.train()
        runs[is_approx] = trainer.model
    approx, exact = runs[True], runs[False]
    # From the second step on each forward pass happens twice, with the same numbers.
    assert exact.drawn == [approx.drawn[0]] + [drawn for drawn in approx.drawn[1:] for _ in range(2)]
    assert exact.norm.num_batches_tracked == 5
    torch.testing.assert_close(exact.norm.running_mean, approx.norm.running_mean, rtol=0, atol=0)


def test_memory_is_one_copy_more_than_approx(tmp_path):
    sizes = {}
    for is_approx in (True, False):
        trainer = train(arguments(tmp_path, is_approx=is_approx, max_steps=3))
        states = trainer.optimizer.state_dict()["state"].values()
        sizes[is_approx] = sum(t.numel() for state in states for name, t in state.items() if name != "step")
    assert sizes[False] - sizes[True] == sum(p.numel() for p in trainer.model.parameters())


def test_an_optimizer_of_ones_own_and_a_second_call_of_train(tmp_path):
    model = gpt2()
    optimizer = MARS(mars_param_groups(model, lr=1e-2), is_approx=False)
    trainer = MARSTrainer(
        model=model, args=arguments(tmp_path, max_steps=3), train_dataset=rows(), optimizers=(optimizer, None)
    )
    trainer.train()
    trainer.train()
    assert all("previous_param" in state for state in optimizer.state.values())
    assert sum(isinstance(c, ReferenceGradient) for c in trainer.callback_handler.callbacks) == 1


class Scaled(Recorder):
    """fp16: Accelerate takes it on GPUs only, so its GradScaler is put in place by hand."""

    def create_optimizer(self, model=None):
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10**6)
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"
        return super().create_optimizer(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(tmp_path, precision):
    seen = []

    class See(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
            states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
            seen.append({(name, key): t.clone() for name, s in states.items() for key, t in s.items()})

    args = arguments(tmp_path, is_approx=False, max_steps=16, warmup_steps=0, bf16=precision == "bf16")
    trainer = train(args, trainer_class=Scaled if precision == "fp16" else Recorder, callbacks=[See()])
    if precision == "fp16":
        skipped = sum(not states for states in seen) - 1
        assert skipped > 0  # the first scale overflows
        assert trainer.accelerator.scaler.get_scale() == 2.0 ** (22 - skipped)
    # h of the last step is the clipped gradient of its batch at the parameters of the step before, not at its own.
    model = gpt2()
    for name, p in model.named_parameters():
        p.data.copy_(seen[-1][name, "previous_param"])
    gradient(model, trainer.steps[-1])
    at_previous = {name: p.grad.clone() for name, p in model.named_parameters()}
    gradient(trainer.model, trainer.steps[-1])
    for name, g in at_previous.items():
        if g.ndim == 2:
            h = seen[-1][name, "last_grad"]
            error, change = ((h - other).norm() / g.norm() for other in (g, trainer.model.get_parameter(name).grad))
            assert error < 0.02 and error < 0.2 * change, f"{name}: {error} {change}"


def test_stock_trainer_is_refused(tmp_path):
    mars_hf.register()
    args = arguments(tmp_path, is_approx=False)
    with pytest.raises(ValueError, match=r"use mars_hf\.MARSTrainer"):
        train(args, trainer_class=Trainer)
