"""Scores during training: when, under which names, and that training does not notice."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, default_data_collator

from mars_hf import LMEvalCallback, MARSTrainer, MARSTrainingArguments
from mars_hf.evaluation import evaluate

TASKS, LIMIT = ["arc_easy", "piqa"], 10
SCORES = {"eval_arc_easy_acc", "eval_arc_easy_acc_norm", "eval_piqa_acc", "eval_piqa_acc_norm"}


class Tracker(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append({**logs, "step": state.global_step})


@pytest.fixture
def train(make_model, tokenizer, items_dir, tmp_path):
    """train(callback arguments or None, **training arguments) -> the trainer, four steps later."""

    def run(scoring, steps=4, **arguments):
        defaults = {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
        defaults |= {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 2, "max_steps": steps}
        args = MARSTrainingArguments(output_dir=str(tmp_path / "run"), **{**defaults, **arguments})
        tokens = torch.randint(400, (12, 16), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        tracker = Tracker()
        trainer = MARSTrainer(
            model=make_model(),
            args=args,
            train_dataset=rows,
            eval_dataset=rows[:2],
            processing_class=tokenizer,
            data_collator=default_data_collator,
            callbacks=[tracker],
        )
        if scoring is not None:
            options = {"tasks": TASKS, "limit": LIMIT, "data_dir": items_dir, **scoring}
            trainer.add_callback(LMEvalCallback(trainer, **options))
        trainer.tracker = tracker
        trainer.train()
        return trainer

    return run


def scored(rows):
    return {row["step"]: row for row in rows if SCORES & set(row)}


@pytest.mark.parametrize("is_approx", [True, False], ids=["approx", "exact"])
def test_training_is_the_same_bit_for_bit(train, is_approx):
    arguments = {"optim": "mars", "is_approx": is_approx, "gradient_accumulation_steps": 2}
    without, with_scores = train(None, **arguments), train({"every": 1}, **arguments)
    assert list(scored(with_scores.state.log_history)) == [1, 2, 3, 4], "this test needs scores at every step"
    left, right = (dict(trainer.model.named_parameters()) for trainer in (without, with_scores))
    torch.testing.assert_close(left, right, rtol=0, atol=0, msg=lambda m: f"parameters differ: {m}")
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (without, with_scores)]
    assert losses[0] == losses[1] and len(losses[0]) == 4, "the training loss must be logged at every step"
    assert with_scores.processing_class.pad_token is None, "the tokenizer got a pad token"


def test_scores_are_logged_tracked_written_and_those_of_the_checkpoint(train, items_dir, tmp_path):
    trainer = train({"every": 2}, save_strategy="steps", save_steps=2)
    logged = scored(trainer.state.log_history)
    assert list(logged) == [2, 4], "every=2 of 4 steps"
    assert scored(trainer.tracker.logs) == logged, "trackers"
    for step, row in logged.items():
        assert set(row) == SCORES | {"step", "epoch"}, "names"
        written = json.loads((tmp_path / "run" / f"lm_eval-{step}.json").read_text())
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        after = evaluate(
            checkpoint, tasks=TASKS, limit=LIMIT, data_dir=trainer.callback_handler.callbacks[-1]._suite._data_dir
        )
        assert written["tasks"] == after["tasks"], f"the model in memory and checkpoint-{step}"
        for task in TASKS:
            for metric in ("acc", "acc_norm"):
                assert row[f"eval_{task}_{metric}"] == written["tasks"][task][metric], f"{metric} of {task}"


def test_a_second_callback_writes_files_of_its_own_and_both_know_their_results(train, items_dir, tmp_path):
    trainer = train({"tasks": ["arc_easy"], "every": 2}, steps=1)
    trainer.add_callback(LMEvalCallback(trainer, tasks=["piqa"], every=1, limit=1, data_dir=items_dir))
    trainer.args.max_steps = 3
    trainer.train()
    first, second = (c for c in trainer.callback_handler.callbacks if isinstance(c, LMEvalCallback))
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "run").glob("lm_eval-*")}
    names = {"lm_eval-2.json": "arc_easy", **{f"lm_eval-{step}-1.json": "piqa" for step in (1, 2, 3)}}
    assert {name: next(iter(result["tasks"])) for name, result in written.items()} == names
    assert first.result is None, "step 3 was not scored"
    assert second.result == written["lm_eval-3-1.json"]


@pytest.mark.parametrize(
    ("every", "arguments", "steps"),
    [
        ("save", {"save_strategy": "steps", "save_steps": 3}, [3, 6, 7]),
        ("epoch", {}, [6, 7]),
        ("save", {"save_strategy": "epoch"}, [6, 7]),
        ("5", {}, [5]),
        (None, {}, []),
    ],
)
def test_when_it_scores(train, every, arguments, steps):
    trainer = train({"every": every, "tasks": "arc_easy", "limit": 1}, steps=7, **arguments)
    assert list(scored(trainer.state.log_history)) == steps, f"every={every!r}, {arguments}"


def test_a_score_chooses_the_best_model(train, tmp_path):
    trainer = train(
        {"tasks": ["arc_easy"], "limit": 40},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_arc_easy_acc_norm",
        learning_rate=0.1,
    )
    scores = {step: row["eval_arc_easy_acc_norm"] for step, row in scored(trainer.state.log_history).items()}
    best = max(scores, key=scores.get)
    assert len(set(scores.values())) > 1, "this test needs scores that change"
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, scores[best]), scores
    saved = load_file(tmp_path / "run" / f"checkpoint-{best}" / "model.safetensors")
    for name, value in saved.items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=0, atol=0, msg=f"{name}: not the best")
    assert scores[4] != scores[best], "this test needs a last model that is not the best"
    assert trainer.evaluate()["eval_arc_easy_acc_norm"] == scores[best], "the best model is evaluated, not the last"


def test_a_second_training_has_scores_of_its_own(train):
    trainer = train({"tasks": ["arc_easy"]}, eval_strategy="no", metric_for_best_model="eval_arc_easy_acc_norm")
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    rows = [row for row in trainer.state.log_history if SCORES & set(row)]
    assert [row["step"] for row in rows] == [4], "the model after the second training was not scored"


def test_a_failure_is_reported_and_training_goes_on(train, caplog):
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_sciq_acc_norm"}
    trainer = train({"tasks": ["sciq"], "every": 2}, **best)
    assert trainer.state.global_step == 4 and not scored(trainer.state.log_history)
    assert trainer.state.best_metric == -math.inf, "an unknown score is the best of none"
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("mars_hf")]
    assert len(warnings) == 3, "before the first step and at each evaluation"
    assert all("sciq" in line and "\n" not in line for line in warnings), warnings


def test_strict_ends_a_training_whose_items_are_missing_before_it_begins(train):
    with pytest.raises(ValueError, match="tasks: no items for 'sciq'"):
        train({"tasks": ["sciq"], "every": 2, "strict": True})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every: 0 is not allowed"),
        ({"every": "sometimes"}, "every: 'sometimes' is not allowed; pass a number of steps"),
        ({"tasks": ["hellaswgg"]}, "did you mean 'hellaswag'"),
        ({"limit": 0}, "limit: 0"),
        ({"batch_size": "big"}, "batch_size: 'big'"),
    ],
)
def test_mistakes_are_errors_at_once(train, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        train(arguments)
    assert "\n" not in str(caught.value)
