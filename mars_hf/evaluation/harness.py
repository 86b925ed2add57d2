"""evaluate(): scores of a causal language model on stock lm-eval tasks, online or not."""

import importlib.metadata
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def evaluate(
    model_or_path: Any,
    *,
    tasks: Sequence[str],
    tokenizer: Any = None,
    data_dir: str | os.PathLike | None = None,
    limit: int | None = None,
    num_fewshot: int = 0,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Scores a causal language model with the stock tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness).

    Prompts, metrics and task versions are those of the installed lm-eval; only the source of the items is chosen here.
    For each task it is the first of: `data_dir`; the Hugging Face Hub, if it answers within three seconds; the cache of
    `datasets`; 300 items embedded in this package (hellaswag, arc_easy, arc_challenge). The result says which, and
    calls the score of a subset one. Nothing outside is changed: the random states, the training mode of every module,
    the config and the tokenizer are the same afterwards.

    Args:
        model_or_path: A causal transformers model, wrapped by DistributedDataParallel or torch.compile or not; or a
            checkpoint folder or a name on the Hub.
        tasks: Names of single lm-eval tasks, such as ["hellaswag", "arc_easy"].
        tokenizer: The model's transformers tokenizer; needed with a model in memory, else loaded from the path.
        data_dir: Folder with `<task>/<split>.jsonl`, one item a line in the schema of the task's dataset. If only the
            validation split of a task that scores the test split is there, it is scored, and the result says so.
        limit: Score only the first `limit` items of each task; None for all.
        num_fewshot: Number of examples in the prompt. They come from the split the stock task takes them from.
        batch_size: Sequences in a forward pass; does not change the scores beyond rounding.

    Returns:
        Plain data, ready for json.dumps. `tasks` maps a name to its scores (`acc`, `acc_stderr`, `acc_norm`,
        `acc_norm_stderr`, or what else the task reports; a standard error is None where lm-eval has none), `items` (the
        number scored), `total_items` (in the full split, None where unknown), `subset` (None where unknown), `data` (in
        words), `source`, `split`, `version` and `num_fewshot`. Beside it: `model`, `limit`, `batch_size`,
        `truncated_requests` (prompts that lost tokens on the left to fit the model) and `versions` of the libraries.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: An argument is out of range, a task is unknown or has no items within reach, or the model is no
            causal language model or returns NaN.
    """
    names = _checked_names(tasks)
    _check_count("limit", limit, least=1, none="all items")
    _check_count("num_fewshot", num_fewshot, least=0)
    _check_count("batch_size", batch_size, least=1)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"data_dir: {os.fspath(data_dir)!r} is not a folder; pass one with <task>/<split>.jsonl")
    if find_spec("lm_eval") is None:
        raise ImportError('evaluate() needs lm-eval, which is not installed: pip install "mars-hf[eval]"')

    # Imported here: lm-eval takes seconds, and is not needed by those who train only.
    import lm_eval

    from mars_hf.evaluation.models import prepare
    from mars_hf.evaluation.scorer import Scorer
    from mars_hf.evaluation.sources import find_items
    from mars_hf.evaluation.state import quiet, same_random_state, same_training_mode
    from mars_hf.evaluation.tasks import build_task, stock_config

    with same_random_state(), quiet():
        configs = {name: stock_config(name) for name in names}
        folder = None if data_dir is None else Path(data_dir)
        items = {name: find_items(name, config, folder, num_fewshot) for name, config in configs.items()}
        model, tokenizer = prepare(model_or_path, tokenizer)
        with same_training_mode(model):
            scorer = Scorer(model, tokenizer, batch_size)
            built = {name: build_task(configs[name], items[name], num_fewshot) for name in names}
            # Not simple_evaluate, which only calls this: it would seed the global generators and describe the machine
            # with pip and git in subprocesses, for seconds.
            report = lm_eval.evaluate(scorer, {"tasks": built}, limit=limit, log_samples=False)

    return {
        "tasks": {name: _task_result(name, report, items[name]) for name in names},
        "model": {
            "class": type(model).__name__,
            "name_or_path": str(getattr(model, "name_or_path", "")),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "max_length": scorer.max_length,
        },
        "limit": limit,
        "batch_size": batch_size,
        "truncated_requests": scorer.truncated,
        "versions": {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "torch")},
    }


def _task_result(name: str, report: Any, items: Any) -> dict[str, Any]:
    scored = report["n-samples"][name]["effective"]
    scores = {}
    for key, value in report["results"][name].items():
        metric, comma, answer_filter = key.partition(",")
        if comma:  # "acc_stderr,none": a metric, perhaps its standard error, and the filter the answers went through
            label = metric.removesuffix("_stderr")
            if answer_filter != "none":
                label += f"/{answer_filter}"
            known = isinstance(value, (int, float)) and math.isfinite(value)
            scores[label + "_stderr" * metric.endswith("_stderr")] = float(value) if known else None
    return scores | {
        "items": scored,
        "total_items": items.total,
        "subset": None if items.total is None else scored < items.total,
        "data": items.describe(scored),
        "source": items.source,
        "split": items.scored,
        "version": report["versions"][name],
        "num_fewshot": report["n-shot"][name],
    }


def _checked_names(tasks: Sequence[str]) -> list[str]:
    names = [tasks] if isinstance(tasks, str) else list(tasks or [])
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'tasks: {tasks!r} is not a list of task names; pass for example ["hellaswag", "arc_easy"]')
    return list(dict.fromkeys(names))


def _check_count(argument: str, value: Any, least: int, none: str | None = None) -> None:
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        way_out = f"pass an integer of at least {least}" + (f", or None for {none}" if none else "")
        raise ValueError(f"{argument}: {value!r} is not allowed; {way_out}")
