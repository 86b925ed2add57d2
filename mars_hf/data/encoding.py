"""Texts to uint16 tokens, as fast as the tokenizer at hand allows.

tiktoken encodes byte-level BPE like GPT-2's many times as fast as `tokenizers`, to the same ids. So where it is
installed and the tokenizer is of that kind, its merges are handed to tiktoken.
"""

import json
from importlib.util import find_spec
from typing import Any

import numpy as np

from mars_hf.data.bins import MAX_VOCABULARY, TOKEN

# How GPT-2 cuts text into words, which the pre-tokenizer ByteLevel(use_regex=True) of `tokenizers` does too.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Encoder:
    """Encodes documents, each followed by the end of text; a special token spelled out in one is plain text.

    Args:
        tokenizer: a fast tokenizer of transformers, with an eos token and at most 65,536 tokens.

    Raises:
        ValueError: no eos token, no fast tokenizer, or more tokens than uint16 can hold.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        name = tokenizer.name_or_path
        if backend is None:
            raise ValueError(f"tokenizer_name={name!r} is no fast tokenizer: choose one that has a tokenizer.json")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer_name={name!r} has no eos_token to end a document with: choose another")
        if len(tokenizer) > MAX_VOCABULARY:
            raise ValueError(
                f"tokenizer_name={name!r} has {len(tokenizer):,} tokens, the files hold ids below {MAX_VOCABULARY:,}: "
                "choose a smaller one, or train on the text itself (pretrain_gpt2.py --dataset_name)"
            )
        self.eos = tokenizer.eos_token_id
        self._tiktoken = _as_tiktoken(backend)
        # A tokenizer of its own: the flag would change what the caller's does.
        self._backend = type(backend).from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def engine(self) -> str:
        """tiktoken or tokenizers."""
        return "tokenizers" if self._tiktoken is None else "tiktoken"

    def __call__(self, text: str) -> np.ndarray:
        """The tokens of one document and its end, uint16."""
        if self._tiktoken is not None:
            ids = self._tiktoken.encode_to_numpy(text, disallowed_special=())
        else:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        tokens = np.empty(len(ids) + 1, TOKEN)
        tokens[:-1], tokens[-1] = ids, self.eos
        return tokens


def _as_tiktoken(backend: Any) -> Any:
    """The same tokenizer in tiktoken, or None where that is not installed or would not give the same ids."""
    if find_spec("tiktoken") is None:
        return None
    import tiktoken

    parts = json.loads(backend.to_str())
    model, words = parts["model"], parts["pre_tokenizer"] or {}
    special = {token["content"]: token["id"] for token in parts["added_tokens"]}
    # Added tokens that are not special are cut out of the text first, which tiktoken does not do.
    plain = parts["normalizer"] is None and all(token["special"] for token in parts["added_tokens"])
    byte_level = words.get("type") == "ByteLevel" and words.get("use_regex") and not words.get("add_prefix_space")
    if not (plain and byte_level and model["type"] == "BPE"):
        return None
    if any(model.get(option) for option in ("dropout", "unk_token", "byte_fallback", "ignore_merges")):
        return None
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    vocabulary = {token: i for token, i in model["vocab"].items() if token not in special}
    merged = [vocabulary.get("".join(pair), -1) for pair in model["merges"]]
    # tiktoken merges by id, `tokenizers` by the order of merges: the same, where ids follow that order.
    if merged != sorted(set(merged) - {-1}) or len(vocabulary) != 256 + len(merged):
        return None
    ranks = {bytes(letters[letter] for letter in token): i for token, i in vocabulary.items()}
    return tiktoken.Encoding("byte-level BPE", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=special)


def _byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE spells each byte by: itself if it can be printed, else the next from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}
