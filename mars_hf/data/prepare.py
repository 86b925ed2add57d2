"""A corpus to files of tokens: in parallel, and to the same bytes when it is killed and started again.

Each split is cut into parts, runs of documents whose bounds depend on the corpus alone. A process writes a part under a
temporary name and renames it, so a part that is there is whole; parts that are there are not written again. In the end
the parts are joined in order, the files are renamed, and the manifest, written last, says that all is done.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from tqdm.auto import tqdm

from mars_hf.data.bins import MANIFEST, header
from mars_hf.data.encoding import Encoder

# Documents of a part, where there are many; a part is what a kill can cost.
DOCUMENTS_PER_PART = 10_000
TOKENS_PER_SHARD = 100_000_000
FORMATS = ("nanogpt", "shards")
COUNTS = ("documents", "tokens", "bytes")
_COUNTS_BYTES = 8 * len(COUNTS)
_PARTS, _PLAN = ".parts", "plan.json"


def prepare(
    corpus: DatasetDict,
    tokenizer: Any,
    output_dir: str | Path,
    *,
    source: dict[str, Any],
    format: str = "nanogpt",
    num_proc: int = 1,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> dict[str, Any]:
    """Writes a corpus as tokens, each document followed by the end of text, as nanoGPT does. Empty ones are left out.

    Args:
        corpus: splits "train" and "validation" with a column "text", as `load_text_corpus` returns them.
        tokenizer: see `Encoder`; saved beside the files, in `tokenizer/`.
        output_dir: folder to write to; what an interrupted call left there is used.
        source: where the corpus comes from and how it was split; part of the manifest.
        format: "nanogpt" for train.bin and val.bin, "shards" for fineweb_train_000001.bin, ...
        num_proc: processes; the result does not depend on it.
        tokens_per_shard: tokens of a shard but the last.

    Returns:
        The manifest: source, tokenizer, and documents, tokens, bytes of text of each split, and tokens and sha256 of
        each file.

    Raises:
        ValueError: an unknown format, a folder with other files or those of another corpus, too little disk space, or a
            tokenizer that the format cannot hold.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown: choose {' or '.join(FORMATS)}")
    if num_proc < 1 or tokens_per_shard < 1:
        raise ValueError(f"num_proc={num_proc} and tokens_per_shard={tokens_per_shard} must be 1 or more")
    output, encoder = Path(output_dir), Encoder(tokenizer)
    plan = {
        "source": source,
        "format": format,
        "tokens_per_shard": tokens_per_shard if format == "shards" else None,
        "tokenizer": {
            "name": tokenizer.name_or_path,
            "vocab_size": len(tokenizer),
            "eos_token_id": encoder.eos,
            "sha256": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        },
        "corpus": {name: _fingerprint(split) for name, split in corpus.items()},
    }
    done = _claim(output, plan)
    if done is not None:
        return done
    parts = output / _PARTS
    there = sum(part.stat().st_size for part in parts.iterdir() if part.suffix != ".tmp")
    check_space(output, needed_bytes(corpus, encoder) - there, "for the tokens and the parts they are joined from")
    counts = _encode(corpus, encoder, parts, num_proc)
    files, splits = {}, {}
    for name, of_parts in counts.items():
        splits[name] = {key: sum(count[key] for count in of_parts) for key in COUNTS}
        sources = [(parts / _part_name(name, i), count["tokens"]) for i, count in enumerate(of_parts)]
        for file, start, stop in _files(name, format, splits[name]["tokens"], tokens_per_shard):
            first = header(stop - start) if format == "shards" else b""
            sha = _write(output / file, chain([first], _between(sources, start, stop)), parts)
            files[file] = {"tokens": stop - start, "sha256": sha}
    tokenizer.save_pretrained(output / "tokenizer")
    manifest = {**plan, "splits": splits, "files": files}
    _write(output / MANIFEST, [json.dumps(manifest, indent=2).encode()], parts)
    shutil.rmtree(parts)
    return manifest


def check_space(folder: Path, needed: float, purpose: str) -> None:
    """Refuses to start what the disk cannot hold.

    Args:
        folder: where to write, there or not.
        needed: bytes.
        purpose: what for, as the error says it.

    Raises:
        ValueError: there is less.
    """
    there = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"{str(folder)!r} needs about {needed / 1e9:.3g} GB {purpose}, {free / 1e9:.3g} GB are free: "
            "choose another disk"
        )


def needed_bytes(corpus: DatasetDict, encoder: Encoder) -> int:
    """Bytes of the parts and the files, by the share of tokens in the first documents."""
    total = 0
    for split in corpus.values():
        text = encoded = 0
        for document in split.select(range(min(len(split), 20)))["text"]:
            document = (document or "")[:100_000]
            text, encoded = text + len(document.encode()), encoded + len(encoder(document))
        # The table holds the rows of both splits where they were drawn from one.
        rows = len(split) / max(1, split.data.num_rows)
        total += int(2 * 2 * split.data.nbytes * rows * encoded / max(1, text))
    return total


def _claim(output: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the folder for this plan; the manifest, if all was done before."""
    known = next((file for file in (output / MANIFEST, output / _PARTS / _PLAN) if file.is_file()), None)
    if known is None:
        if output.exists() and any(output.glob("*.bin")):
            raise ValueError(f"output_dir={str(output)!r} holds .bin files of another origin: choose an empty folder")
        (output / _PARTS).mkdir(parents=True, exist_ok=True)
        _write(output / _PARTS / _PLAN, [json.dumps(plan, indent=2).encode()], output / _PARTS)
        return None
    seen = json.loads(known.read_text())
    different = [key for key in plan if seen.get(key) != plan[key]]
    if different:
        raise ValueError(
            f"output_dir={str(output)!r} holds tokens of another {', '.join(different)}: choose another or remove it"
        )
    if known.name != MANIFEST:
        return None
    shutil.rmtree(output / _PARTS, ignore_errors=True)
    return seen


def _fingerprint(split: Dataset) -> dict[str, Any]:
    """Tells another corpus of the same name by a thousand documents, which are all of a small one."""
    sha = hashlib.sha256()
    for i in range(0, len(split), max(1, len(split) // 1000)):
        sha.update((split[i]["text"] or "").encode() + b"\0")
    return {"documents": len(split), "sha256": sha.hexdigest()}


def _encode(corpus: DatasetDict, encoder: Encoder, parts: Path, num_proc: int) -> dict[str, list[dict[str, int]]]:
    """Writes the parts that are not there yet; counts of all of them, in order."""
    counts: dict[str, list[Any]] = {}
    missing: list[tuple[str, int, range]] = []
    for name, split in corpus.items():
        size = max(1, min(DOCUMENTS_PER_PART, len(split) // 64))
        ranges = [range(start, min(start + size, len(split))) for start in range(0, len(split), size)]
        counts[name] = [_read_counts(parts / _part_name(name, i)) for i in range(len(ranges))]
        missing += [(name, i, rows) for i, rows in enumerate(ranges) if counts[name][i] is None]
    total = sum(len(split) for split in corpus.values())
    to_do = sum(len(rows) for _, _, rows in missing)
    with tqdm(total=total, initial=total - to_do, unit="doc", desc=f"Tokenising by {encoder.engine}") as progress:
        tokens = 0
        for (name, i, rows), count in _run(corpus, encoder, parts, missing, min(num_proc, len(missing))):
            counts[name][i] = count
            tokens += count["tokens"]
            progress.set_postfix(tokens=f"{tokens:,}", refresh=False)
            progress.update(len(rows))
    return counts


def _run(corpus: DatasetDict, encoder: Encoder, parts: Path, jobs: list, num_proc: int) -> Iterator[tuple[Any, Any]]:
    """Does the jobs, here or in processes of their own, and tells of each when it is done."""
    if num_proc <= 1:
        for job in jobs:
            yield job, _write_part(corpus, encoder, parts, *job)
        return
    with ProcessPoolExecutor(num_proc, initializer=_start_worker, initargs=(corpus, encoder, parts)) as pool:
        futures = {pool.submit(_work, *job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


_worker: tuple[Any, ...] = ()


def _start_worker(*arguments: Any) -> None:
    global _worker
    _worker = arguments
    parent = multiprocessing.parent_process()
    # Nobody tells the workers of a killed process to stop.
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _work(*job: Any) -> dict[str, int]:
    return _write_part(*_worker, *job)


def _write_part(corpus: DatasetDict, encoder: Encoder, parts: Path, name: str, i: int, rows: range) -> dict[str, int]:
    """One part: its counts, as int64, then the tokens."""
    tokens, documents, size = [], 0, 0
    for start in range(rows.start, rows.stop, 100):
        for text in corpus[name][start : min(start + 100, rows.stop)]["text"]:
            if text:
                tokens.append(encoder(text))
                documents, size = documents + 1, size + len(text.encode())
    counts = [documents, sum(map(len, tokens)), size]
    _write(parts / _part_name(name, i), [np.array(counts, "<i8").tobytes(), *tokens], parts)
    return dict(zip(COUNTS, counts))


def _read_counts(part: Path) -> dict[str, int] | None:
    """Counts of a part, None if it is not there as a whole."""
    if not part.is_file():
        return None
    counts = np.fromfile(part, "<i8", len(COUNTS)).tolist()
    whole = len(counts) == len(COUNTS) and part.stat().st_size == _COUNTS_BYTES + 2 * counts[1]
    return dict(zip(COUNTS, counts)) if whole else None


def _part_name(split: str, i: int) -> str:
    return f"{split}-{i:06d}"


def _files(split: str, format: str, tokens: int, tokens_per_shard: int) -> Iterator[tuple[str, int, int]]:
    """Name, first token and end of each file of a split."""
    short = {"train": "train", "validation": "val"}[split]
    if format == "nanogpt":
        yield f"{short}.bin", 0, tokens
        return
    # As FineWeb's shards are counted: 0 is the validation file.
    first = 0 if short == "val" else 1
    for i, start in enumerate(range(0, tokens, tokens_per_shard)):
        yield f"fineweb_{short}_{first + i:06d}.bin", start, min(start + tokens_per_shard, tokens)


def _between(sources: list[tuple[Path, int]], start: int, stop: int) -> Iterator[np.ndarray]:
    """The bytes of tokens `start` to `stop` of the parts in order."""
    begin = 0
    for part, tokens in sources:
        first, last = max(start - begin, 0), min(stop - begin, tokens)
        if first < last:
            yield np.fromfile(part, np.uint8, 2 * (last - first), offset=_COUNTS_BYTES + 2 * first)
        begin += tokens


def _write(path: Path, pieces: Iterable[Any], scratch: Path) -> str:
    """Writes a file that is there as a whole or not at all; its sha256."""
    # Processes that outlive a killed one may write the same file.
    temporary = scratch / f"{path.name}.{os.getpid()}.tmp"
    sha = hashlib.sha256()
    with temporary.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            sha.update(piece)
    temporary.replace(path)
    return sha.hexdigest()
