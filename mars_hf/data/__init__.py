"""From text to blocks of tokens: a corpus, a tokenizer, packing, files of tokens, streams, the bytes behind the tokens.

The names below load on first use, so that importing this package imports neither `datasets` nor `transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.data.bins import TokenBlocks, bin_files, read_tokens, write_tokens
    from mars_hf.data.corpus import load_text_corpus
    from mars_hf.data.order import Shuffled
    from mars_hf.data.packing import causal_collator, count_bytes, pack
    from mars_hf.data.streaming import StreamedBlocks
    from mars_hf.data.tokenizer import character_tokenizer, corpus_tokenizer, train_tokenizer

_HOME = {
    "Shuffled": "mars_hf.data.order",
    "StreamedBlocks": "mars_hf.data.streaming",
    "TokenBlocks": "mars_hf.data.bins",
    "bin_files": "mars_hf.data.bins",
    "causal_collator": "mars_hf.data.packing",
    "character_tokenizer": "mars_hf.data.tokenizer",
    "corpus_tokenizer": "mars_hf.data.tokenizer",
    "count_bytes": "mars_hf.data.packing",
    "load_text_corpus": "mars_hf.data.corpus",
    "pack": "mars_hf.data.packing",
    "read_tokens": "mars_hf.data.bins",
    "train_tokenizer": "mars_hf.data.tokenizer",
    "write_tokens": "mars_hf.data.bins",
}

__all__ = [
    "Shuffled",
    "StreamedBlocks",
    "TokenBlocks",
    "bin_files",
    "causal_collator",
    "character_tokenizer",
    "corpus_tokenizer",
    "count_bytes",
    "load_text_corpus",
    "pack",
    "read_tokens",
    "train_tokenizer",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
