"""evaluate(): scores of a causal language model on stock lm-eval tasks, online or not."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.evaluation.suite import Suite


def evaluate(
    model_or_path: Any,
    *,
    tasks: Sequence[str],
    tokenizer: Any = None,
    data_dir: str | os.PathLike | None = None,
    limit: int | None = None,
    num_fewshot: int = 0,
    batch_size: int | str = 8,
    distributed: bool = False,
) -> dict[str, Any]:
    """Scores a causal language model with the stock tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness).

    Prompts, metrics and task versions are those of the installed lm-eval; only the source of the items is chosen here.
    For each task it is the first of: `data_dir`; the Hugging Face Hub, if it answers within three seconds; the cache of
    `datasets`; the items embedded in this package (300 of hellaswag, arc_easy and arc_challenge, 100 of piqa,
    winogrande, openbookqa and boolq, two of each subject of mmlu). The result says which, and calls the score of a
    subset one. Nothing outside is changed: the random states, the training mode of every module, the gradients, the
    config and the tokenizer are the same afterwards.

    Args:
        model_or_path: A causal transformers model, wrapped by DistributedDataParallel or torch.compile or not, in
            shards of FSDP2 or ZeRO-3 or not; or a checkpoint folder or a name on the Hub.
        tasks: Names of lm-eval tasks, such as ["hellaswag", "arc_easy"] or "hellaswag,arc_easy"; "mmlu" stands for its
            57 subjects, averaged by their numbers of items.
        tokenizer: The model's transformers tokenizer; needed with a model in memory, else loaded from the path.
        data_dir: Folder with `<task>/<split>.jsonl`, one item a line in the schema of the task's dataset; of MMLU
            `mmlu/<subject>/<split>.jsonl`. If only the validation split of a task that scores the test split is there,
            it is scored, and the result says so.
        limit: Score only the first `limit` items of each task, of each subject of mmlu; None for all.
        num_fewshot: Number of examples in the prompt. They come from the split the stock task takes them from.
        batch_size: Sequences in a forward pass, or "auto" for as many as make up 4,096 tokens, at most 64; does not
            change the scores beyond rounding.
        distributed: All processes of `torch.distributed` make this call and share the work; each gets the result, the
            same as on one process. Needed for a model in shards.

    Returns:
        Plain data, ready for json.dumps. `tasks` maps a name to its scores (`acc`, `acc_stderr`, `acc_norm`,
        `acc_norm_stderr`, or what else the task reports; a standard error is None where lm-eval has none), `items` (the
        number scored), `total_items` (in the full split, None where unknown), `subset` (None where unknown), `data` (in
        words), `source`, `split`, `version` and `num_fewshot`. Beside it: `model`, `limit`, `batch_size`, `processes`,
        `truncated_requests` (prompts that lost tokens on the left to fit the model) and `versions` of the libraries.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: An argument is out of range, a task is unknown or has no items within reach, or the model is no
            causal language model or returns NaN; or another process failed.
    """
    check_scoring(limit, batch_size)
    suite = load_suite(tasks, data_dir=data_dir, num_fewshot=num_fewshot, distributed=distributed)
    return suite.score(model_or_path, tokenizer, limit, batch_size)


def load_suite(
    tasks: Sequence[str], *, data_dir: str | os.PathLike | None, num_fewshot: int = 0, distributed: bool
) -> "Suite":
    """Looks up tasks, not yet their items; see `evaluate` for arguments and errors."""
    names = task_names(tasks)
    _check_count("num_fewshot", num_fewshot, "pass an integer of at least 0", least=0)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"data_dir: {os.fspath(data_dir)!r} is not a folder; pass one with <task>/<split>.jsonl")
    if find_spec("lm_eval") is None:
        raise ImportError('evaluate() needs lm-eval, which is not installed: pip install "mars-hf[eval]"')

    # Imported here: lm-eval takes seconds, and is not needed by those who train only.
    from mars_hf.evaluation.suite import Suite

    return Suite(names, None if data_dir is None else Path(data_dir), num_fewshot, distributed)


def check_scoring(limit: int | None, batch_size: int | str) -> None:
    """Raises ValueError if `limit` or `batch_size` is out of range; see `evaluate`."""
    if limit is not None:
        _check_count("limit", limit, "pass an integer of at least 1, or None for all items", least=1)
    if batch_size != "auto":
        _check_count("batch_size", batch_size, 'pass an integer of at least 1, or "auto"', least=1)


def task_names(tasks: Sequence[str]) -> list[str]:
    """The names in a list, in which commas separate names too, each once.

    Raises:
        ValueError: There are none, or they are no strings.
    """
    given = [tasks] if isinstance(tasks, str) else list(tasks or [])
    strings = all(isinstance(name, str) for name in given)
    names = [name.strip() for names in given for name in names.split(",") if name.strip()] if strings else []
    if not names:
        raise ValueError(f'tasks: {tasks!r} is not a list of task names; pass for example ["hellaswag", "arc_easy"]')
    return list(dict.fromkeys(names))


def _check_count(argument: str, value: Any, way_out: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{argument}: {value!r} is not allowed; {way_out}")
