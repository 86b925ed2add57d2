"""A text corpus for training and for held-out evaluation: the embedded one, a dataset, or the user's own files."""

import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

EMBEDDED = Path(__file__).parent / "embedded" / "austen.txt"

# Readers of files that never ask the network, which load_dataset("text", ...) does, to count downloads.
READERS: dict[str, Callable[..., Any]] = {
    ".txt": Dataset.from_text,
    ".md": Dataset.from_text,
    ".json": Dataset.from_json,
    ".jsonl": Dataset.from_json,
    ".parquet": Dataset.from_parquet,
    ".csv": Dataset.from_csv,
}


def load_text_corpus(
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    dataset_path: str | Path | None = None,
    text_column: str = "text",
    validation_fraction: float = 0.1,
    validation_split: str | None = None,
    seed: int = 42,
) -> DatasetDict:
    """Loads documents, split into a part to train on and a part to evaluate on that never overlap.

    With neither `dataset_name` nor `dataset_path`: the embedded corpus, two novels by Jane Austen (1.36 MB, public
    domain). Local files are read without the network.

    The held-out part is, in this order,

    - of plain text (.txt, .md; a file is a document, and so is the embedded corpus) the end of every file, from the
      first paragraph (or line, where no blank line follows) that starts in its last `validation_fraction`;
    - the split named by `validation_split`, or the split "validation" where there is one;
    - a random `validation_fraction` of the documents of the split "train", the same for the same `seed`.

    Args:
        dataset_name: What `datasets.load_dataset` takes: a name on the hub, or a directory with a dataset.
        dataset_config: Name of a configuration of `dataset_name`.
        dataset_path: A file, a directory or a glob of .txt/.md, .json/.jsonl, .parquet or .csv files, one kind at a
            time. In a directory of structured files, splits go by file name ("train", "validation", "test"), as
            `load_dataset` does; with a glob all files are one split.
        text_column: Column with the documents.
        validation_fraction: Share to hold out, of the characters of each file or of the number of documents.
        validation_split: Split of a structured dataset to evaluate on.
        seed: Seed of the random choice of documents.

    Returns:
        Splits "train" and "validation" with the one column "text", documents in their original order.

    Raises:
        ValueError: An argument that contradicts another or points at nothing, files that cannot be read, or a corpus
            without text on either side.
    """
    if dataset_name is not None and dataset_path is not None:
        raise ValueError(
            f"dataset_name={dataset_name!r} and dataset_path={str(dataset_path)!r} are both given: choose one"
        )
    if dataset_config is not None and dataset_name is None:
        raise ValueError(f"dataset_config={dataset_config!r} needs dataset_name")
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must lie between 0 and 1, both excluded")

    if dataset_name is not None:
        source = f"dataset_name={dataset_name!r}"
        splits = _load(source, load_dataset, dataset_name, dataset_config)
    else:
        source = f"dataset_path={str(dataset_path or EMBEDDED)!r}"
        splits = _load_path(source, Path(dataset_path or EMBEDDED).expanduser())

    if isinstance(splits, Dataset):
        if validation_split is not None:
            raise ValueError(
                f"validation_split={validation_split!r} needs a dataset with splits, {source} is plain text"
            )
        documents = text_only(splits, text_column, source)
        cut = {"fraction": validation_fraction}
        corpus = DatasetDict(train=documents.map(_start, fn_kwargs=cut), validation=documents.map(_end, fn_kwargs=cut))
    else:
        parts = _parts(splits, validation_split, source)
        parts = DatasetDict({name: text_only(part, text_column, source) for name, part in parts.items()})
        corpus = parts if "validation" in parts else _split_documents(parts["train"], validation_fraction, seed)

    for name, split in corpus.items():
        if not any(text and not text.isspace() for text in split["text"]):
            raise ValueError(f"{source} leaves no text for {name!r}: add text or change validation_fraction")
    return corpus


def _load(source: str, loader: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with read_errors(source):
        return loader(*args, **kwargs)


@contextmanager
def read_errors(source: str) -> Iterator[None]:
    """Makes one line of the errors of `datasets`, which span many and often hide the cause.

    Args:
        source: the argument and its value, as the error names it.

    Raises:
        ValueError: whatever went wrong inside.
    """
    try:
        yield
    except (DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ValueError(f"{source} cannot be loaded: {reason}") from error


def _load_path(source: str, path: Path) -> Dataset | DatasetDict:
    """Loads local files: plain text as a Dataset with a row per file, structured files as a DatasetDict."""
    if path.is_dir():
        # A README describes the data, it is not part of it; `datasets` skips it too.
        found = [file for file in path.rglob("*") if file.suffix in READERS and file.name != "README.md"]
    else:
        found = [Path(file) for file in ([path] if path.exists() else glob.glob(str(path), recursive=True))]
    files = sorted(str(file) for file in found if file.is_file() and file.stat().st_size)
    if not files:
        raise ValueError(
            f"{source} finds no file with any content: give a file, a directory or a glob of {', '.join(READERS)}"
        )

    suffixes = sorted({Path(file).suffix for file in files})
    readers = {READERS[suffix] for suffix in suffixes if suffix in READERS}
    if len(readers) != 1 or not READERS.keys() >= set(suffixes):
        raise ValueError(
            f"{source} has files {', '.join(suffixes)}: choose one kind of {', '.join(READERS)} with a glob"
        )
    reader = readers.pop()
    # The readers take names for patterns.
    files = [glob.escape(file) for file in files]
    if reader is Dataset.from_text:
        return _load(source, Dataset.from_text, files, sample_by="document")
    if path.is_dir():
        return _load(source, load_dataset, str(path))
    return DatasetDict(train=_load(source, reader, files))


def text_only(data: Any, text_column: str, source: str) -> Any:
    """A dataset or stream with the documents as its one column "text".

    Args:
        data: one split, a Dataset or an IterableDataset.
        text_column: column with the documents.
        source: the argument and its value, as the error names it.

    Raises:
        ValueError: no such column, or one without text.
    """
    if text_column not in data.column_names:
        nearest = get_close_matches(text_column, data.column_names, n=1, cutoff=0)
        raise ValueError(
            f"text_column={text_column!r} is not in {source} (seen: {', '.join(data.column_names)}): "
            f"did you mean {''.join(nearest)!r}?"
        )
    kind = getattr(data.features[text_column], "dtype", "a list or struct")
    if kind not in ("string", "large_string"):
        raise ValueError(f"text_column={text_column!r} of {source} holds {kind}, not text: choose another column")
    data = data.select_columns(text_column)
    return data if text_column == "text" else data.rename_column(text_column, "text")


def _parts(splits: DatasetDict, validation_split: str | None, source: str) -> DatasetDict:
    """Train split of a structured dataset, with its held-out split where there is one."""
    seen = ", ".join(splits)
    if "train" not in splits:
        raise ValueError(f"{source} has no split 'train' (seen: {seen})")
    if validation_split == "train" or (validation_split is not None and validation_split not in splits):
        raise ValueError(f"validation_split={validation_split!r} is not a held-out split of {source} (seen: {seen})")
    held_out = validation_split or "validation"
    if held_out not in splits:
        return DatasetDict(train=splits["train"])
    return DatasetDict(train=splits["train"], validation=splits[held_out])


def _split_documents(documents: Dataset, fraction: float, seed: int) -> DatasetDict:
    held_out = round(fraction * len(documents))
    if not 0 < held_out < len(documents):
        raise ValueError(
            f"validation_fraction={fraction} of {len(documents)} documents leaves one side empty: change it or add some"
        )
    order = np.random.default_rng(seed).permutation(len(documents))
    validation, train = np.sort(order[:held_out]), np.sort(order[held_out:])
    return DatasetDict(train=documents.select(train), validation=documents.select(validation))


def _cut(text: str, fraction: float) -> int:
    """Index where the held-out end of a text starts."""
    target = len(text) - round(fraction * len(text))
    for boundary in (r"\n\s*\n", r"\n"):
        found = re.compile(boundary).search(text, target)
        if found and not text[found.end() :].isspace() and found.end() < len(text):
            return found.end()
    return len(text)


def _start(row: dict[str, str], fraction: float) -> dict[str, str]:
    return {"text": row["text"][: _cut(row["text"], fraction)]}


def _end(row: dict[str, str], fraction: float) -> dict[str, str]:
    return {"text": row["text"][_cut(row["text"], fraction) :]}
