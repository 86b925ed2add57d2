"""MARSTrainer on a tiny GPT-2: the hand-written loop, accumulation, resume, precision, refusals."""

import math

import pytest
import torch
from tiny import arguments, assert_same, gpt2, losses, rows, train, weights
from torch import nn
from transformers import Trainer, TrainerCallback

from mars_hf import MARS, MARSTrainer, mars_param_groups


def authors_lr(step, peak, minimum, warmup, total):
    """Linear warm-up from 0, cosine down to the minimum."""
    if step < warmup:
        return peak * step / warmup
    return minimum + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) * (peak - minimum)


@pytest.mark.parametrize("optim", ["mars_adamw", "mars_lion", "mars_shampoo", "mars_m"])
@pytest.mark.parametrize("decay", ["trainer", "authors"])
def test_equals_a_loop_written_by_hand(tmp_path, optim, decay):
    batches = []

    def collate(examples):
        batches.append(torch.stack([example["input_ids"] for example in examples]))
        return {"input_ids": batches[-1], "labels": batches[-1]}

    trainer = train(arguments(tmp_path, optim=optim, mars_decay=decay, lr_1d=4e-3), data_collator=collate)

    model = gpt2()
    names = [n for n, _ in model.named_parameters() if "bias" not in n and "ln_" not in n]
    groups = mars_param_groups(
        model,
        lr=1e-2,
        mars_type=optim.replace("_", "-"),
        weight_decay=0.01,
        lr_1d=4e-3,
        decay_names=names if decay == "trainer" else None,
    )
    optimizer = MARS(groups, mars_type=optim.replace("_", "-"), ns_dtype=torch.float32)
    peaks = [g["lr"] for g in optimizer.param_groups]
    for step, batch in enumerate(batches[:10]):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = authors_lr(step, peak, peak / 10, 3, 10)
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(weights(trainer), {n: p.detach() for n, p in model.named_parameters()}, 2e-6)


def test_schedule_of_both_learning_rates_is_the_authors(tmp_path):
    seen = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            seen.append(
                [{g["rule"]: g["lr"] for g in optimizer.param_groups}[rule] for rule in ("mars-adamw", "adamw")]
            )

    train(arguments(tmp_path, lr_1d=5e-3), callbacks=[Rates()])
    expected = [[authors_lr(t, 1e-2, 1e-3, 3, 10), authors_lr(t, 5e-3, 5e-4, 3, 10)] for t in range(10)]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-6, atol=0)


def test_accumulation_gives_the_same_training(tmp_path):
    whole = train(arguments(tmp_path, per_device_train_batch_size=8))
    parts = train(arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4))
    assert_same(weights(whole), weights(parts), 1e-5)


def test_the_sharing_of_memory_with_gradients_does_not_matter(tmp_path):
    """A Trainer whose zero_grad keeps the buffers must train the same."""

    class Reusing(MARSTrainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            zero = optimizer.zero_grad
            optimizer.zero_grad = lambda set_to_none=True: zero(set_to_none=False)
            return optimizer

    assert_same(weights(train(arguments(tmp_path))), weights(train(arguments(tmp_path), trainer_class=Reusing)))


@pytest.mark.parametrize("optim", ["mars_adamw", "mars_lion", "mars_shampoo", "mars_m"])
def test_resume_continues_bit_for_bit_in_mid_epoch(tmp_path, optim):
    """Six steps an epoch, a checkpoint at step 4, dropout on: parameters, every state tensor and the losses."""
    settings = {"optim": optim, "mars_last_grad_dtype": "bfloat16"}
    straight = train(arguments(tmp_path / "straight", **settings), gpt2(0.1))
    saving = arguments(tmp_path / "run", save_strategy="steps", save_steps=4, **settings)
    train(saving, gpt2(0.1))
    resumed = train(saving, gpt2(0.1), resume=str(tmp_path / "run" / "checkpoint-4"))
    assert_same(weights(straight), weights(resumed))
    assert losses(straight)[4:] == losses(resumed)[4:]
    assert len(losses(resumed)) == 10
    left, right = (t.optimizer.state_dict()["state"] for t in (straight, resumed))
    assert left.keys() == right.keys()
    for i in left:
        assert left[i].keys() == right[i].keys()
        for name, tensor in left[i].items():
            assert tensor.dtype == right[i][name].dtype
            torch.testing.assert_close(right[i][name], tensor, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_checkpoint_of_another_optimizer_is_refused(tmp_path):
    args = arguments(tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=4, max_steps=4)
    train(args)
    with pytest.raises(ValueError, match="of the saved param groups"):
        train(arguments(tmp_path), resume=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"max_grad_norm": 0.0},
        {"average_tokens_across_devices": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_features_of_the_trainer(tmp_path, settings):
    plain = train(arguments(tmp_path, max_grad_norm=settings.get("max_grad_norm", 0.5)))
    trainer = train(arguments(tmp_path, **settings))
    assert type(trainer.optimizer.optimizer) is MARS
    # Autocast rounds activations to three digits; everything else computes the same.
    tolerance = 0.05 if "bf16" in settings else 1e-5
    torch.testing.assert_close(losses(trainer), losses(plain), rtol=tolerance, atol=0)


def test_frozen_parameters_stay_and_have_no_state(tmp_path):
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = train(arguments(tmp_path, optim="mars_m"), model)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
        assert (p in trainer.optimizer.optimizer.state) == p.requires_grad


def test_optimizer_cls_and_kwargs_and_own_optimizer_take_precedence(tmp_path):
    kwargs = {"lr": 1e-2, "mars_type": "mars-lion"}
    trainer = train(arguments(tmp_path), optimizer_cls_and_kwargs=(MARS, kwargs), trainer_class=Trainer)
    assert {g["rule"] for g in trainer.optimizer.param_groups} == {"mars-lion", "adamw"}
    trainer = train(arguments(tmp_path), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1e-2}))
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    model = gpt2()
    own = torch.optim.SGD(model.parameters(), lr=1e-2)
    assert train(arguments(tmp_path), model, optimizers=(own, None)).optimizer.optimizer is own


def test_decay_groups_follow_an_overridden_rule(tmp_path):
    class Everything(MARSTrainer):
        def get_decay_parameter_names(self, model):
            return [name for name, _ in model.named_parameters()]

    trainer = train(arguments(tmp_path), trainer_class=Everything)
    assert {g["weight_decay"] for g in trainer.optimizer.param_groups} == {0.01}


@pytest.mark.parametrize("mars_type", ["adamw", "moonlight"])
def test_baselines_run_through_the_same_path(tmp_path, mars_type):
    trainer = train(arguments(tmp_path, mars_type=mars_type))
    assert mars_type in {g["rule"] for g in trainer.optimizer.param_groups}


def test_misspelt_grouping_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mars_decay='autors' is unknown: did you mean 'authors'"):
        train(arguments(tmp_path, mars_decay="autors"))


def test_optimizer_of_another_model_on_request(tmp_path):
    other = nn.Linear(3, 2)
    trainer = MARSTrainer(model=gpt2(), args=arguments(tmp_path), train_dataset=rows())
    optimizer = trainer.create_optimizer(other)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in other.parameters()}


@pytest.mark.parametrize("optim", ["mars", "mars_m"])
@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
def test_mars_fused_is_the_same_training_and_leaves_the_gradients_unclipped(tmp_path, optim, max_grad_norm, compiles):
    """The norm is logged as ever, and the clip bites."""
    norms = []

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model, **kwargs):
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    runs = []
    for fused in (False, True):
        settings = {"optim": optim, "mars_ns_dtype": "float32", "max_grad_norm": max_grad_norm, "mars_fused": fused}
        # The eps: the gradient of the keys' bias is nothing but rounding.
        runs.append(train(arguments(tmp_path, logging_steps=1, adam_epsilon=1e-5, **settings), callbacks=[Watch()]))
    (plain, logged), (fused, logged_fused) = (
        (run, [row["grad_norm"] for row in run.state.log_history if "grad_norm" in row]) for run in runs
    )
    assert logged_fused == pytest.approx(logged, rel=1e-5) and min(logged) > 0.1
    assert norms[len(logged) :] == pytest.approx(logged_fused, rel=1e-5)
    assert norms[: len(logged)] == pytest.approx([max_grad_norm] * len(logged) if max_grad_norm else logged, rel=1e-3)
    for (name, p), q in zip(plain.model.named_parameters(), fused.model.parameters()):
        torch.testing.assert_close(q, p, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("fused", [False, True], indirect=True)
def test_step_skipped_for_an_overflow_leaves_parameters_and_reference_gradient_alone(tmp_path, fused):
    """Loss scaling in the Trainer, with an overflow at the fourth step, at which the schedule waits too."""

    class Overflowing(MARSTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            # accelerate gives CPU no scaler by itself.
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("inf") if self.state.global_step == 3 else loss

    history = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model, optimizer, **kwargs):
            tensors = {f"{i}.{k}": v.clone() for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
            history.append({**{n: p.detach().clone() for n, p in model.named_parameters()}, **tensors})

    trainer = train(arguments(tmp_path, max_steps=6, mars_fused=fused), trainer_class=Overflowing, callbacks=[Watch()])
    assert trainer.lr_scheduler.last_epoch == 5
    assert isinstance(trainer.optimizer.scaler, torch.amp.GradScaler)
    for name, value in history[3].items():
        torch.testing.assert_close(value, history[2][name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    moved = [name for name in history[4] if not torch.equal(history[4][name], history[3][name])]
    assert any("last_grad" in name for name in moved)
    assert all(torch.isfinite(value).all() for value in history[-1].values())
