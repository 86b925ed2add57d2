"""Stock lm-eval tasks with their items, found once to score any number of models."""

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask

from mars_hf.evaluation.models import prepare
from mars_hf.evaluation.ranks import Ranks
from mars_hf.evaluation.scorer import Scorer
from mars_hf.evaluation.sources import Items, find_items, summary
from mars_hf.evaluation.state import no_caches_left, quiet, same_random_state, same_training_mode
from mars_hf.evaluation.tasks import build_task, members, stock_config, stock_group


class Suite:
    """Tasks and their items.

    Args:
        names: Names of tasks.
        data_dir, num_fewshot, distributed: See `evaluate`.

    Raises:
        ValueError: A task is unknown.
    """

    def __init__(self, names: Sequence[str], data_dir: Path | None, num_fewshot: int, distributed: bool) -> None:
        self._distributed, self._data_dir, self._num_fewshot = distributed, data_dir, num_fewshot
        self._members = {name: members(name) for name in names}
        self._configs = {task: stock_config(task) for tasks in self._members.values() for task in tasks}
        self._items: dict[str, Items] = {}
        self._tasks: dict[str, ConfigurableTask] = {}
        self._groups: dict[str, Group] = {}

    def find(self) -> None:
        """Finds the items and builds the tasks, once.

        Raises:
            ValueError: A task has no items within reach, or none that fit it, here or on another process.
        """
        if self._tasks:
            return
        self._ranks = Ranks(self._distributed)
        with same_random_state(), quiet():
            self._items = self._ranks.agree(
                lambda: {
                    name: find_items(name, config, self._data_dir, self._num_fewshot)
                    for name, config in self._configs.items()
                }
            )
            tasks = self._ranks.agree(
                lambda: {
                    name: build_task(config, self._items[name], self._num_fewshot)
                    for name, config in self._configs.items()
                }
            )
        groups = {name: stock_group(name, [tasks[task] for task in parts]) for name, parts in self._members.items()}
        self._groups = {name: group for name, group in groups.items() if group}
        self._tasks = tasks

    def score(self, model_or_path: Any, tokenizer: Any, limit: int | None, batch_size: int | str) -> dict[str, Any]:
        """Scores a model; arguments, result and errors are those of `evaluate`."""
        self.find()
        with same_random_state(), quiet():
            model, tokenizer = self._ranks.agree(lambda: prepare(model_or_path, tokenizer))
            with same_training_mode(model), no_caches_left(model):
                # Here and not within lm-eval: what fails on one process only must not leave the others waiting.
                self._ranks.agree(lambda: [task.build_all_requests(limit=limit) for task in self._tasks.values()])
                scorer = Scorer(model, tokenizer, batch_size, self._ranks)
                # Not simple_evaluate, which only calls this: it would seed the global generators and describe the
                # machine with pip and git in subprocesses, for seconds.
                wanted = {"tasks": self._tasks, "groups": self._groups}
                report = lm_eval.evaluate(scorer, wanted, limit=limit, log_samples=False)
        return {
            "tasks": {name: self._task_result(name, report) for name in self._members},
            "model": {
                "class": type(model).__name__,
                "name_or_path": str(getattr(model, "name_or_path", "")),
                # Under ZeRO-3 a parameter at rest has no elements.
                "parameters": sum(
                    getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
                ),
                "max_length": scorer.max_length,
            },
            "limit": limit,
            "batch_size": batch_size,
            "processes": self._ranks.size,
            "truncated_requests": scorer.truncated,
            "versions": {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "torch")},
        }

    def _task_result(self, name: str, report: Any) -> dict[str, Any]:
        scores: dict[str, float | None] = {}
        for key, value in report["results"][name].items():
            # "acc_stderr,none": a metric, perhaps its standard error, and the filter the answers went through
            metric, comma, answer_filter = key.partition(",")
            if comma:
                label = metric.removesuffix("_stderr")
                if answer_filter != "none":
                    label += f"/{answer_filter}"
                known = isinstance(value, (int, float)) and math.isfinite(value)
                scores[label + "_stderr" * metric.endswith("_stderr")] = float(value) if known else None
        tasks = self._members[name]
        parts: list[tuple[Items, int]] = [(self._items[task], report["n-samples"][task]["effective"]) for task in tasks]
        return (
            scores
            | summary(parts)
            | {
                "version": report["versions"][name],
                "num_fewshot": report["n-shot"][tasks[0]],
            }
        )
