"""From text to blocks of tokens: a corpus, a tokenizer, packing, and the bytes behind the tokens.

The names below load on first use, so that importing this package imports neither `datasets` nor `transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.data.corpus import load_text_corpus
    from mars_hf.data.packing import causal_collator, count_bytes, pack
    from mars_hf.data.tokenizer import character_tokenizer, corpus_tokenizer, train_tokenizer

_HOME = {
    "causal_collator": "mars_hf.data.packing",
    "character_tokenizer": "mars_hf.data.tokenizer",
    "corpus_tokenizer": "mars_hf.data.tokenizer",
    "count_bytes": "mars_hf.data.packing",
    "load_text_corpus": "mars_hf.data.corpus",
    "pack": "mars_hf.data.packing",
    "train_tokenizer": "mars_hf.data.tokenizer",
}

__all__ = [
    "causal_collator",
    "character_tokenizer",
    "corpus_tokenizer",
    "count_bytes",
    "load_text_corpus",
    "pack",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
