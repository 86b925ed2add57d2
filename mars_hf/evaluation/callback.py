"""lm-eval scores during training."""

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mars_hf.evaluation.harness import check_scoring, load_suite, task_names

logger = logging.getLogger(__name__)


class LMEvalCallback(TrainerCallback):
    """Scores the model in memory during training: `trainer.add_callback(LMEvalCallback(trainer, tasks=...))`.

    The scores are logged as `eval_<task>_<metric>`, in the log history and by trackers; `lm_eval-<step>.json` in
    `output_dir` holds the whole result of `evaluate` (that of a second such callback is `lm_eval-<step>-1.json`).
    `metric_for_best_model` may name one of them; they are then
    computed at every evaluation of the Trainer as well. (An EarlyStoppingCallback that watches one must be added after
    this callback.) On several processes, under DDP, FSDP2 or DeepSpeed, all share the work and get the scores. Training
    goes on as if nothing had been scored, bit for bit.

    Args:
        trainer: The Trainer, whose `processing_class` is the model's tokenizer.
        tasks: Names of lm-eval tasks, see `evaluate`.
        every: Number of optimizer steps between two evaluations; "epoch": after each epoch; "save": whenever the
            Trainer saves a checkpoint; None: only when `score()` is called.
        limit: Score only the first `limit` items of each task; None for all.
        data_dir: Folder with `<task>/<split>.jsonl`, see `evaluate`.
        num_fewshot: Number of examples in the prompt.
        batch_size: Sequences in a forward pass, or "auto".
        strict: An evaluation that fails ends the training, one whose items are out of reach before its first step.
            Otherwise the failure is reported as a warning and training goes on.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: An argument is out of range or a task is unknown.
    """

    def __init__(
        self,
        trainer: Any,
        tasks: Sequence[str],
        *,
        every: int | str | None = None,
        limit: int | None = None,
        data_dir: str | os.PathLike | None = None,
        num_fewshot: int = 0,
        batch_size: int | str = "auto",
        strict: bool = False,
    ) -> None:
        check_scoring(limit, batch_size)
        self.trainer, self.tasks, self.every, self.strict = trainer, task_names(tasks), _interval(every), strict
        self._suite = load_suite(tasks, data_dir=data_dir, num_fewshot=num_fewshot, distributed=True)
        self._limit, self._batch_size = limit, batch_size
        self._step = -1  # the last step that was scored
        self._result: dict[str, Any] | None = None  # and its result, None if that failed
        self._scores: dict[str, float] = {}

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of `evaluate` for the model of this step; None if it was not scored, or that failed."""
        return self._result if self._step == self.trainer.state.global_step else None

    def score(self) -> dict[str, Any] | None:
        """Scores the model as it is now, logs the scores and writes them to `output_dir`; all processes must call it.

        Returns:
            The result of `evaluate`; None if it failed and `strict` is False.

        Raises:
            Exception: It failed and `strict` is True.
        """
        self._step, self._result, self._scores = self.trainer.state.global_step, None, {}
        try:
            tokenizer = self.trainer.processing_class
            result = self._suite.score(self.trainer.model, tokenizer, self._limit, self._batch_size)
        except Exception as error:
            self._failed(error)
            return None
        self._result = result
        self._scores = {
            f"eval_{task}_{metric}": value
            for task, found in result["tasks"].items()
            for metric in (key.removesuffix("_stderr") for key in found if key.endswith("_stderr"))
            if (value := found[metric]) is not None
        }
        # Logging would take back the Trainer's own decision to log at this step.
        control = self.trainer.control
        logs_too = control.should_log
        self.trainer.log(dict(self._scores))
        control.should_log = logs_too
        if self.trainer.is_world_process_zero():
            alike = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, LMEvalCallback)]
            place = alike.index(self) if self in alike else 0
            path = Path(self.trainer.args.output_dir) / f"lm_eval-{self._step}{f'-{place}' if place else ''}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2))
        return result

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finds the items, so that a task without any is reported before hours of training."""
        self._step = -1
        try:
            self._suite.find()
        except Exception as error:
            self._failed(error)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Scores if the step is one of `every`, or is about to be saved."""
        if isinstance(self.every, int):
            due = state.global_step % self.every == 0
        else:
            due = self.every == "save" and control.should_save
        if due:
            self.score()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Scores if an epoch is over, or is about to be saved."""
        if self.every == "epoch" or (self.every == "save" and control.should_save and self._step != state.global_step):
            self.score()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the scores of this step to those that `metric_for_best_model` may name."""
        metrics = kwargs["metrics"]
        best = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
        ours = best.startswith(tuple(f"eval_{task}_" for task in self.tasks))
        if ours and self._step != state.global_step:
            self.score()
        if self._step == state.global_step:
            metrics.update(self._scores)
            if ours and not self._scores:
                metrics[best] = math.nan  # no better than any other

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Scores a checkpoint that nobody had announced, as with `save_strategy="best"`."""
        if self.every == "save" and self._step != state.global_step:
            self.score()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets the scores of the last step where the best model has taken its place."""
        if args.load_best_model_at_end:
            self._step = -1

    def _failed(self, error: Exception) -> None:
        if self.strict:
            raise error
        if self.trainer.is_world_process_zero():
            message = " ".join(str(error).split()) or type(error).__name__
            logger.warning("lm-eval of %s failed at step %d: %s", ", ".join(self.tasks), max(self._step, 0), message)


def _interval(every: int | str | None) -> int | str | None:
    if every in (None, "epoch", "save"):
        return every
    try:
        steps = int(every)
    except (TypeError, ValueError):
        steps = 0
    if steps < 1:
        raise ValueError(f'every: {every!r} is not allowed; pass a number of steps of at least 1, "epoch" or "save"')
    return steps
