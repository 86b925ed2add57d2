"""Metrics for the `evaluate` library, found without the Hub."""

import difflib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_CLASSES = {"perplexity": "Perplexity", "bits_per_byte": "BitsPerByte"}


def load_metric(name: str) -> Any:
    """Loads a metric of this package; `evaluate.load` on the path of its module file gives the same.

    Args:
        name: "perplexity" or "bits_per_byte".

    Returns:
        A fresh `evaluate.Metric`, which keeps what it is given in memory.

    Raises:
        ImportError: The evaluate library is not installed.
        ValueError: No metric has this name.
    """
    if name not in _CLASSES:
        near = difflib.get_close_matches(str(name), _CLASSES, n=1, cutoff=0.0)[0]
        raise ValueError(f"name: {name!r} is no metric of this package; did you mean {near!r}?")
    if find_spec("evaluate") is None:
        raise ImportError('load_metric() needs evaluate, which is not installed: pip install "mars-hf[eval]"')
    return getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])(keep_in_memory=True)
