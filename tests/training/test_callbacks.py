"""--mars_metrics: the logged values, computed again by hand from the gradients."""

import pytest
import torch
from tiny import arguments, assert_same, gpt2, losses, rows, train, weights
from transformers import Trainer, TrainerCallback

import mars_hf
from mars_hf.training import callbacks
from mars_hf.training.callbacks import TrainingCost

NAMES = ("relative_change", "cosine", "clipped", "c_over_g")


class Gradients(TrainerCallback):
    """g, h and m of every matrix at every step, before the step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        step = []
        for p in model.parameters():
            if p.ndim == 2:
                kept = optimizer.state.get(p, {})
                none = torch.zeros_like(p)
                g = p.grad.double() / getattr(optimizer.optimizer, "grad_scale", 1.0)
                step.append((g, *(kept.get(n, none).double() for n in ("last_grad", "exp_avg"))))
        self.steps.append(step)


def by_hand(step, alpha, clip_c):
    change, cosine, clipped, ratio = [], [], [], []
    for g, h, _ in step:
        c = g + alpha * (g - h)
        change.append((g - h).norm() / g.norm())
        cosine.append(torch.cosine_similarity(g.flatten(), h.flatten(), dim=0))
        clipped.append((c.norm() > clip_c).double())
        ratio.append(c.norm() / g.norm())
    return dict(zip(NAMES, (torch.stack(values).mean().item() for values in (change, cosine, clipped, ratio))))


@pytest.mark.parametrize("is_approx", [True, False])
@pytest.mark.parametrize("more", [{}, {"mars_last_grad_dtype": "bfloat16"}, {"optim": "mars_m"}, {"mars_fused": True}])
def test_logged_values(tmp_path, is_approx, more, request):
    if more.get("mars_fused"):
        request.getfixturevalue("compiles")
    gradients = Gradients()
    settings = {
        "is_approx": is_approx,
        "mars_clip_c": 0.2,
        "logging_steps": 2,
        "max_steps": 8,
        "mars_gamma": 0.1,
        **more,
    }
    trainer = train(arguments(tmp_path, mars_metrics=True, **settings), callbacks=[gradients])
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    far_c = far_g = 0.0
    for row in rows:
        step = gradients.steps[row["step"] - 1]
        if more.get("optim") == "mars_m":  # embeddings go to AdamW
            step = [kept for kept in step if kept[1].any()]
        expected = by_hand(step, 0.1 * 0.95 / 0.05, 0.2)
        assert {name: row[f"mars/{name}"] for name in NAMES} == pytest.approx(expected, rel=1e-4, abs=1e-7)
        for g, h, m in step:
            far_g += (g - m).square().sum().item()
            far_c += (g + 0.1 * 0.95 / 0.05 * (g - h) - m).square().sum().item()
        if is_approx:
            assert "mars/variance_ratio" not in row
        else:
            assert row["mars/variance_ratio"] == pytest.approx(far_c / far_g, rel=1e-4)
    assert len({row["mars/clipped"] for row in rows} - {0.0}) > 0
    # Looking changes nothing.
    plain = train(arguments(tmp_path, **settings))
    assert_same(weights(trainer), weights(plain))
    assert losses(trainer) == losses(plain)
    assert not any(name.startswith("mars/") for row in plain.state.log_history for name in row)


def test_first_step_has_no_reference(tmp_path):
    trainer = train(arguments(tmp_path, mars_metrics=True, max_steps=2))
    first, second = (row for row in trainer.state.log_history if "loss" in row)
    assert "mars/cosine" not in first
    assert "mars/cosine" in second


@pytest.mark.parametrize(
    "settings", [{"mars_type": "adamw"}, {"optim": "mars_m", "mars_memory_efficient": True, "mars_clip_c": 0}]
)
def test_nothing_to_measure(tmp_path, settings):
    with pytest.raises(ValueError, match="mars_metrics=True has nothing to measure"):
        train(arguments(tmp_path, mars_metrics=True, **settings), gpt2())


def test_stock_trainer_is_refused(tmp_path):
    mars_hf.register()
    with pytest.raises(ValueError, match=r"mars_metrics=True.*use mars_hf\.MARSTrainer"):
        train(arguments(tmp_path, mars_metrics=True), trainer_class=Trainer)


def test_cost_counts_the_seconds_of_steps_alone_and_goes_on_after_a_resume(tmp_path, monkeypatch):
    """On a clock that moves by 10 in every forward pass, in training and in evaluation."""
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])

    def model():
        ticking = gpt2()
        ticking.register_forward_pre_hook(lambda *_: now.__setitem__(0, now[0] + 10))
        return ticking

    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings["gradient_accumulation_steps"] = 2
    costs = [TrainingCost(), TrainingCost()]
    whole = train(arguments(tmp_path, **settings), model(), callbacks=[costs[0]], eval_dataset=rows())
    elapsed = [(row["step"], row["elapsed_seconds"]) for row in whole.state.log_history if "loss" in row]
    assert elapsed == [(1, 20), (2, 40), (3, 60), (4, 80)], "two micro-batches a step, no evaluation"
    assert [row["elapsed_seconds"] for row in whole.state.log_history if "eval_loss" in row] == [40, 80]
    report = costs[0].report()
    assert report["training_seconds"] == 80
    sizes = {True: 3, False: 2}  # in multiples of the parameter: mars-adamw for matrices, adamw for vectors
    tensors = [p for p in whole.model.parameters() if p.requires_grad]
    assert report["optimizer_state_bytes"] == sum(4 * (sizes[p.ndim == 2] * p.numel() + 1) for p in tensors)
    assert report["peak_memory_bytes"] > 50e6
    resume = str(tmp_path / "checkpoint-2")
    train(arguments(tmp_path, **settings), model(), resume=resume, callbacks=[costs[1]], eval_dataset=rows())
    assert costs[1].report()["training_seconds"] == 80
