"""Where the items of a task come from: a folder of the user, the Hub, the datasets cache, or the embedded items."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from mars_hf.hub import hub_reachable

ITEMS = Path(__file__).parent / "items"
MANIFEST: dict[str, dict[str, Any]] = json.loads((ITEMS / "manifest.json").read_text())

# Items in the full split, where a folder cannot tell (sizes of the datasets on the Hub).
SPLIT_SIZES = {(task, entry["split"]): entry["items_in_split"] for task, entry in MANIFEST.items()} | {
    ("arc_easy", "validation"): 570,
    ("arc_challenge", "validation"): 299,
    ("openbookqa", "validation"): 500,
    ("sciq", "validation"): 1000,
    ("sciq", "test"): 1000,
}


@dataclass(frozen=True)
class Items:
    """The items of one task.

    Args:
        source: "data_dir", "hub", "cache" or "embedded".
        splits: Name of a split to its rows; the split to score, and the one few-shot examples come from if needed.
        scored: Name of the split to score.
        stock: Name of the split the stock task scores.
        total: Number of items in the full split, None where unknown.
    """

    source: str
    splits: Mapping[str, datasets.Dataset]
    scored: str
    stock: str
    total: int | None

    def describe(self, items: int) -> str:
        """Says in words what a score over these items stands on.

        Args:
            items: Number of items scored.

        Returns:
            For example "embedded subset: first 300 of 10,042 validation items".
        """
        at_hand = len(self.splits[self.scored])
        if self.total is None:
            text = f"{self.source}: {_first(items, at_hand)} {self.scored} items (size of the full split unknown)"
        elif items == self.total:
            text = f"{self.source}: all {items:,} {self.scored} items"
        elif self.source == "data_dir" and at_hand < self.total:
            # Which items of the full split the user's file holds is not known.
            text = f"data_dir subset: {items:,} of {self.total:,} {self.scored} items"
        else:
            text = f"{self.source} subset: first {items:,} of {self.total:,} {self.scored} items"
        return text if self.scored == self.stock else f"{text}; the stock task scores {self.stock}"


def summary(parts: Sequence[tuple[Items, int]]) -> dict[str, Any]:
    """What a score stands on, as it appears in a result.

    Args:
        parts: The items of a task, or of each task of a group, and how many of them were scored.
    """
    first, items = parts[0][0], sum(scored for _, scored in parts)
    sizes = [part.total for part, _ in parts]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    source = ", ".join(sorted({part.source for part, _ in parts}))
    if len(parts) == 1:
        data = first.describe(items)
    else:
        of = "size of the full split unknown" if total is None else f"of {total:,}"
        data = f"{source}: {items:,} {first.scored} items ({of}) in {len(parts)} parts"
    return {
        "items": items,
        "total_items": total,
        "subset": None if total is None else items < total,
        "data": data,
        "source": source,
        "split": first.scored,
    }


def _first(items: int, at_hand: int) -> str:
    return f"all {items:,}" if items == at_hand else f"first {items:,} of {at_hand:,}"


def find_items(task: str, config: Mapping[str, Any], data_dir: Path | None, num_fewshot: int) -> Items:
    """Takes the items of a task from the first place that has them: data_dir, the Hub, its cache, this package.

    Args:
        task: Name of the task.
        config: Its stock definition.
        data_dir: Folder with `<task>/<split>.jsonl` in the schema of the task's dataset, or None.
        num_fewshot: Number of examples in the prompt; above 0, the split they come from is loaded too.

    Raises:
        ValueError: No place has the items, or a folder that has them lacks the split of the few-shot examples.
    """
    wanted = [config[key] for key in ("test_split", "validation_split") if config.get(key)]
    if not wanted or not config.get("dataset_path"):
        raise ValueError(f"tasks: {task!r} has no dataset split to score; choose another task")
    examples = _fewshot_split(config) if num_fewshot else None
    name = _folder(task, config)

    if data_dir is not None and (items := _from_folder(data_dir, "data_dir", name, wanted, examples)):
        return items
    online = hub_reachable()
    for source in ["hub", "cache"] if online else ["cache"]:
        splits = _from_datasets(config, offline=source == "cache")
        if splits and wanted[0] in splits and (examples is None or examples in splits):
            needed = {wanted[0], examples} & splits.keys()
            total = len(splits[wanted[0]])
            return Items(source, {name: splits[name] for name in needed}, wanted[0], wanted[0], total)
    if items := _from_folder(ITEMS, "embedded", name, wanted, examples):
        return items
    raise ValueError(
        f"tasks: no items for {task!r}: its dataset {config['dataset_path']!r} is "
        f"{'not available from' if online else 'not cached and there is no connection to'} the Hugging Face Hub; "
        f"go online, or pass data_dir= (--lm_eval_data) with {name}/{wanted[0]}.jsonl"
    )


def _folder(task: str, config: Mapping[str, Any]) -> str:
    """Where a folder of items keeps a task: its name, or mmlu/anatomy for a subject of MMLU."""
    return f"mmlu/{config['dataset_name']}" if config["dataset_path"] == "cais/mmlu" else task


def _fewshot_split(config: Mapping[str, Any]) -> str | None:
    """The split the stock task draws its examples from; None if they are part of the definition."""
    own = config.get("fewshot_config") or {}
    if split := config.get("fewshot_split") or own.get("split"):
        return split
    if own.get("samples"):
        return None
    return next(config[f"{kind}_split"] for kind in ("training", "validation", "test") if config.get(f"{kind}_split"))


def _from_folder(folder: Path, source: str, name: str, wanted: list[str], examples: str | None) -> Items | None:
    home = folder / name
    scored = next((split for split in wanted if (home / f"{split}.jsonl").is_file()), None)
    if scored is None:
        return None
    if examples and not (home / f"{examples}.jsonl").is_file():
        place = "data_dir has" if source == "data_dir" else "the items embedded in this package have"
        raise ValueError(
            f"num_fewshot: the examples of {name!r} come from its {examples!r} split, which {place} not; "
            f"pass num_fewshot=0, or data_dir= with {name}/{examples}.jsonl"
        )
    needed = {scored, examples} if examples else {scored}
    splits = {split: _read(home / f"{split}.jsonl") for split in needed}
    return Items(source, splits, scored, wanted[0], SPLIT_SIZES.get((name, scored)))


def _read(path: Path) -> datasets.Dataset:
    # Not the json builder of datasets, which would write a cache; rows read here cannot lead to the network either.
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"data_dir: {path} is not JSON lines ({error}); write one JSON object a line") from error
    if not rows:
        raise ValueError(f"data_dir: {path} holds no items; write one JSON object a line")
    if (odd := next((row for row in rows if not isinstance(row, dict)), None)) is not None:
        raise ValueError(f"data_dir: {path} has {odd!r:.40}, not a JSON object; write one JSON object a line")
    return datasets.Dataset.from_list(rows)


def _from_datasets(config: Mapping[str, Any], offline: bool) -> Mapping[str, datasets.Dataset] | None:
    try:
        with _offline(offline):
            return datasets.load_dataset(
                config["dataset_path"], config.get("dataset_name"), **(config.get("dataset_kwargs") or {})
            )
    except (OSError, ValueError, RuntimeError):  # gone, gated, unreachable, not cached: the next source may have it
        return None


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Makes datasets look into its cache only, by the setting HF_DATASETS_OFFLINE has at import."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
