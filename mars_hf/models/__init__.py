"""Models as the authors of MARS train them.

The names below load on first use, so that importing this package does not import `transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.models.gpt2 import build_gpt2, gpt2_config

_HOME = {"build_gpt2": "mars_hf.models.gpt2", "gpt2_config": "mars_hf.models.gpt2"}

__all__ = ["build_gpt2", "gpt2_config"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
