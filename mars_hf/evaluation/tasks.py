"""Stock lm-eval tasks with another source of items."""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from jinja2 import TemplateError
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import AggMetricConfig
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks.manager import load_yaml

from mars_hf.evaluation.sources import Items

_TASK_LINE = re.compile(r"""^["']?task["']?:[ \t]*["']?([^\s"'\[]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_GROUP_LINE = re.compile(r"""^["']?(?:group|class)["']?:""", re.MULTILINE)

# Groups that are scored as one task, with the file that defines them; their members are all tasks of its folder.
_GROUPS = {"mmlu": "mmlu/default/_mmlu.yaml"}


@functools.cache
def _stock_files() -> dict[str, Path]:
    """Task name to its YAML file.

    lm-eval's TaskManager parses the same 14,000 files, which takes ten times as long as looking for one line in each.
    """
    files: dict[str, Path] = {}
    for path in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml"), key=Path.as_posix):
        text = path.read_text(encoding="utf-8")
        if (line := _TASK_LINE.search(text)) and not _GROUP_LINE.search(text):
            files.setdefault(line[1], path)
    return files


def members(name: str) -> list[str]:
    """The tasks that a name stands for: the subjects of "mmlu", or the name alone."""
    if name not in _GROUPS:
        return [name]
    folder = (Path(lm_eval.tasks.__file__).parent / _GROUPS[name]).parent
    return sorted(task for task, path in _stock_files().items() if path.parent == folder)


def stock_group(name: str, tasks: Sequence[ConfigurableTask]) -> Group | None:
    """The group of this name, which lm-eval averages as its definition says; None if it is a single task."""
    if name not in _GROUPS:
        return None
    config = yaml.safe_load((Path(lm_eval.tasks.__file__).parent / _GROUPS[name]).read_text(encoding="utf-8"))
    metrics = [AggMetricConfig(**metric) for metric in config["aggregate_metric_list"]]
    group = Group(name, aggregate_metric_list=metrics, metadata=config["metadata"])
    for task in tasks:
        group.add(task)
    return group


def stock_config(name: str) -> dict[str, Any]:
    """Reads the definition of a task from the installed lm-eval.

    Args:
        name: Name of a single task, such as "hellaswag"; groups and tasks written in Python have no definition to read.

    Returns:
        The definition, with its functions resolved.

    Raises:
        ValueError: No task has this name, or its own code fails.
    """
    files = _stock_files()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"tasks: {name!r} is no single lm-eval task; did you mean {near!r}? (Name the tasks of a group one by one.)"
        )
    try:
        config = load_yaml(files[name])
    except Exception as error:  # from code of the task's own, which may import or download anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"tasks: the definition of {name!r} cannot be loaded ({reason}); choose another") from error
    return {key: value for key, value in config.items() if key not in {"tag", "group", "task_list"}}


class _Task(ConfigurableTask):
    """A stock task that builds its requests once, however many models it scores.

    Args:
        config: Its definition.
        source: Where its rows come from, for errors.
    """

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self._rows, self._schema = f"the {source} rows of {config['task']!r}", config["dataset_path"]
        with self._fits():
            super().__init__(config=config)

    def build_all_requests(self, *, limit: int | None = None, **options: Any) -> None:
        if getattr(self, "_built_for", ...) != limit:
            with self._fits():
                super().build_all_requests(limit=limit, **options)
            self._built_for = limit
        for instance in self._instances:
            instance.resps, instance.filtered_resps = [], {}

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        with self._fits():
            return super().process_results(doc, results)

    @contextmanager
    def _fits(self) -> Iterator[None]:
        """Says of what the prompt or the metric raises on a row what is wrong."""
        try:
            yield
        except (LookupError, TypeError, ValueError, TemplateError) as error:
            raise ValueError(
                f"tasks: {self._rows} do not fit its prompt ({error!r}); write them in the schema of {self._schema!r}"
            ) from error


def build_task(config: Mapping[str, Any], items: Items, num_fewshot: int) -> ConfigurableTask:
    """Builds a stock task on given items: its prompts, metrics and version, none of its downloads.

    Args:
        config: The stock definition; not modified.
        items: The items.
        num_fewshot: Number of examples in the prompt.

    Raises:
        ValueError: The first row lacks what the task's prompt needs.
    """
    config = dict(config)
    # lm-eval loads the rows of every split that is named here, whether it uses them or not.
    for kind in ("training", "validation", "test", "fewshot"):
        if config.get(f"{kind}_split") not in items.splits:
            config[f"{kind}_split"] = None
    if (own := config.get("fewshot_config")) and own.get("split") not in items.splits:
        config["fewshot_config"] = {key: value for key, value in own.items() if key != "split"}
    # lm-eval runs it again at every look at the rows, over all of them.
    if process_docs := config.get("process_docs"):
        config["process_docs"] = functools.cache(process_docs)
    config |= {"custom_dataset": lambda **_: items.splits, "dataset_kwargs": None, "num_fewshot": num_fewshot}
    task = _Task(config, items.source)
    # A generator of the task's own: the examples do not depend on the global random state, nor change it.
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return task
