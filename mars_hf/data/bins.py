"""Files of tokens: nanoGPT's `train.bin` and `val.bin`, and `fineweb_*.bin` shards; blocks of them by memory map.

    nanoGPT   uint16 tokens and nothing else
    shard     256 int32 (20240520, 1, number of tokens, zeros), then uint16 tokens

All little-endian. A file that starts with the magic number is a shard, whatever its name.
"""

import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
TOKEN = np.dtype("<u2")
MAX_VOCABULARY = 2**16
MANIFEST = "manifest.json"
# The same kind of file with uint32 tokens, as llm.c writes it for the vocabulary of Llama 3.
MAGIC_UINT32 = 20240801


def header(tokens: int) -> bytes:
    """The first 1,024 bytes of a shard.

    Args:
        tokens: how many follow.
    """
    fields = np.zeros(HEADER_BYTES // 4, "<i4")
    fields[:3] = MAGIC, VERSION, tokens
    return fields.tobytes()


def write_tokens(path: str | Path, tokens: Iterable[int] | np.ndarray, *, shard: bool = False) -> None:
    """Writes one file of tokens.

    Args:
        path: the file.
        tokens: token ids, one-dimensional.
        shard: with a header, as `fineweb_*.bin`; otherwise as nanoGPT.

    Raises:
        ValueError: an id that uint16 cannot hold.
    """
    ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < MAX_VOCABULARY:
        raise ValueError(f"tokens={ids.min()}..{ids.max()} for {str(path)!r} do not fit uint16: use ids below 65,536")
    Path(path).write_bytes((header(len(ids)) if shard else b"") + ids.astype(TOKEN).tobytes())


def read_tokens(path: str | Path) -> np.ndarray:
    """Maps the tokens of one file into memory; nothing but its start is read.

    Args:
        path: a file of either kind.

    Returns:
        uint16, read-only.

    Raises:
        ValueError: no file, an empty, truncated or oversized one, or one of another kind; with the offset in bytes.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file: give a .bin file, or a folder or glob of them")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    offset = _first_token(path, start, size)
    if size == offset:
        raise ValueError(f"{path}: no tokens after byte {offset}, the end of the file: write it again")
    if (size - offset) % 2:
        raise ValueError(f"{path}: half a token at byte {size - 1}, the last: truncated, or not uint16")
    return np.memmap(path, TOKEN, "r", offset)


def _first_token(path: Path, start: bytes, size: int) -> int:
    """Offset of the tokens, in bytes."""
    magic, version, count = (int(field) for field in np.frombuffer(start[:12].ljust(12, b"\0"), "<i4"))
    if magic == MAGIC_UINT32:
        raise ValueError(f"{path}: magic number {magic} at byte 0 means uint32 tokens: only uint16 ({MAGIC}) is read")
    if start.startswith(b"\x93NUMPY"):
        raise ValueError(
            f"{path}: a NumPy file by byte 0, not plain tokens: write it with array.astype('uint16').tofile"
        )
    if magic != MAGIC:
        if path.name.startswith("fineweb_"):
            raise ValueError(f"{path}: magic number {magic} at byte 0, a shard has {MAGIC}; nanoGPT's: rename it")
        words = np.frombuffer(start[: len(start) // 4 * 4], TOKEN).reshape(-1, 2)
        # Of wider integers every second half is the upper one. Rare tokens alone never stand in line like this.
        if len(words) >= 8 and words[:, 1].max() <= 2 < words[:, 0].max():
            raise ValueError(f"{path}: 32 or 64 bits a token from byte 0 on by their look: only uint16 is read")
        return 0
    if len(start) < HEADER_BYTES:
        raise ValueError(f"{path}: truncated at byte {size}, inside the header of {HEADER_BYTES} bytes")
    if version != VERSION:
        raise ValueError(f"{path}: version {version} at byte 4, only {VERSION} is read")
    if size != HEADER_BYTES + 2 * count:
        raise ValueError(
            f"{path}: ends at byte {size}, but {count} tokens (byte 8) end at byte {HEADER_BYTES + 2 * count}: "
            "truncated, or not uint16"
        )
    return HEADER_BYTES


def bin_files(path: str | Path) -> dict[str, list[Path]]:
    """Finds files of tokens and tells training from validation by their names.

    Args:
        path: a folder, a file or a glob. train*.bin, val*.bin, fineweb_train_*.bin and fineweb_val_*.bin are known.

    Returns:
        "train" and "validation", each sorted by name; both empty where no .bin file is.

    Raises:
        ValueError: .bin files, but not of both kinds, or one whose name says neither.
    """
    path = Path(path).expanduser()
    found = path.glob("*.bin") if path.is_dir() else map(Path, [path] if path.exists() else glob.glob(str(path)))
    files = sorted(file for file in found if file.suffix == ".bin")
    splits: dict[str, list[Path]] = {"train": [], "validation": []}
    for file in files:
        known = re.match(r"(?:.*_)?(train|val)", file.stem)
        if known is None:
            raise ValueError(f"dataset_path: {file} is neither train*.bin nor val*.bin by its name: rename it")
        splits["train" if known[1] == "train" else "validation"].append(file)
    for split, names in splits.items():
        if files and not names:
            raise ValueError(f"dataset_path={str(path)!r} has no {split} files (seen: {files[0].name}, ...): add some")
    return splits


class TokenBlocks(Dataset):
    """Files of tokens as one stream, cut into blocks; a block is read when it is asked for, and never kept.

    A block may lie in two files: the same tokens in one file or in many give the same blocks. Only the tokens after the
    last whole block are left out.

    Args:
        files: files of either kind, in order.
        block_size: tokens of a block; the model predicts all but the first.
        vocab_size: tokens of the model's vocabulary. The first block of each file is checked here, and every block
            when it is read: nothing is read in vain, and no wrong token gets as far as the embedding.
        max_blocks: use only so many; None for all.

    Raises:
        ValueError: see `read_tokens`; less than one block; a token out of the vocabulary, with file and offset, also
            when a block is read; a file that does not have the size that `manifest.json` beside it says.
    """

    def __init__(
        self, files: Sequence[str | Path], block_size: int, vocab_size: int, *, max_blocks: int | None = None
    ) -> None:
        if block_size < 2:
            raise ValueError(f"block_size={block_size} leaves nothing to predict: use 2 tokens or more")
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"max_blocks={max_blocks} leaves no block: use 1 or more, or None for all")
        self.files, self.block_size, self.vocab_size = [Path(file) for file in files], block_size, vocab_size
        self._maps = [read_tokens(file) for file in self.files]
        self._ends = np.cumsum([len(tokens) for tokens in self._maps], dtype=np.int64)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        _check_manifest(self.files, self._maps)
        whole = self.tokens // block_size
        if not whole:
            raise ValueError(
                f"{', '.join(map(str, self.files))}: {self.tokens} tokens, less than one block of "
                f"block_size={block_size}: add text or lower it"
            )
        self._blocks = whole if max_blocks is None else min(whole, max_blocks)
        for i, tokens in enumerate(self._maps):
            self._checked(i, 0, tokens[:block_size])

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One block: "input_ids", int64 of shape (block_size,)."""
        if not 0 <= index < self._blocks:
            raise IndexError(f"block {index} of {self._blocks}")
        start, parts = index * self.block_size, []
        stop = start + self.block_size
        for i in range(int(np.searchsorted(self._ends, start, side="right")), len(self._maps)):
            begin = int(self._ends[i]) - len(self._maps[i])
            first = max(start - begin, 0)
            parts.append(self._checked(i, first, self._maps[i][first : stop - begin]))
            if stop <= self._ends[i]:
                break
        return {"input_ids": torch.from_numpy(np.concatenate(parts).astype(np.int64))}

    def __getstate__(self) -> dict:
        """Data loader workers map the files themselves; a pickled map would be a copy of its tokens."""
        return {**self.__dict__, "_maps": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = {**state, "_maps": [read_tokens(file) for file in state["files"]]}

    def batches(self, size: int = 1000) -> Iterator[np.ndarray]:
        """All blocks in order, uint16 or wider of shape (at most `size`, block_size)."""
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            yield np.stack([self[i]["input_ids"].numpy() for i in range(start, stop)])

    def _checked(self, i: int, first: int, tokens: np.ndarray) -> np.ndarray:
        if tokens.max() >= self.vocab_size:
            position = first + int(np.argmax(tokens >= self.vocab_size))
            offset = self.files[i].stat().st_size - 2 * (len(self._maps[i]) - position)
            raise ValueError(
                f"{self.files[i]}: token {tokens[position - first]} at byte {offset} is out of the vocabulary of "
                f"{self.vocab_size}: give the tokenizer it was written with, or a larger vocab_size"
            )
        return tokens


def _check_manifest(files: Sequence[Path], maps: Sequence[np.ndarray]) -> None:
    """Headerless files do not tell that they were truncated; the manifest of `prepare` does."""
    for file, tokens in zip(files, maps):
        manifest = file.parent / MANIFEST
        said = _tokens_said(manifest, file.name) if manifest.is_file() else None
        if said is not None and said != len(tokens):
            raise ValueError(
                f"{file}: {len(tokens)} tokens end at byte {file.stat().st_size}, {manifest.name} says {said}: "
                "truncated or replaced, write it again"
            )


def _tokens_said(manifest: Path, name: str) -> int | None:
    """How many tokens a file has by a manifest; None where it is the manifest of something else."""
    try:
        return json.loads(manifest.read_text())["files"][name]["tokens"]
    except (KeyError, TypeError):
        return None
    except ValueError as error:
        raise ValueError(f"{manifest} is no JSON ({error}): remove it or write the files again") from None
