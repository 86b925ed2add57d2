"""Stock lm-eval tasks with another source of items."""

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lm_eval.tasks
from jinja2 import TemplateError
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks.manager import load_yaml

from mars_hf.evaluation.sources import Items

_TASK_LINE = re.compile(r"""^["']?task["']?:[ \t]*["']?([^\s"'\[]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_GROUP_LINE = re.compile(r"""^["']?(?:group|class)["']?:""", re.MULTILINE)


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


def stock_config(name: str) -> dict[str, Any]:
    """Reads the definition of a task from the installed lm-eval.

    Args:
        name: Name of a single task, such as "hellaswag"; groups and tasks written in Python have no definition to read.

    Returns:
        The definition, with its functions resolved.

    Raises:
        ValueError: No task has this name.
    """
    files = _stock_files()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"tasks: {name!r} is no single lm-eval task; did you mean {near!r}? (Name the tasks of a group one by one.)"
        )
    config = load_yaml(files[name])
    return {key: value for key, value in config.items() if key not in {"tag", "group", "task_list"}}


def build_task(config: Mapping[str, Any], items: Items, num_fewshot: int) -> ConfigurableTask:
    """Builds a stock task on given items: its prompts, metrics and version, none of its downloads.

    Args:
        config: The stock definition; not modified.
        items: The items.
        num_fewshot: Number of examples in the prompt.

    Raises:
        ValueError: The rows lack what the task's prompt needs.
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
    try:
        task = ConfigurableTask(config=config)
    except (KeyError, TypeError, ValueError, TemplateError) as error:  # raised by its prompt on the first row
        raise ValueError(
            f"tasks: the {items.source} rows of {config['task']!r} do not fit its prompt ({error!r}); "
            f"write them in the schema of {config['dataset_path']!r}"
        ) from error
    # A generator of the task's own: the examples do not depend on the global random state, nor change it.
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return task
