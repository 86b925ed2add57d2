"""Models as the authors of MARS train them, and of any other architecture.

The names below load on first use, so that importing this package does not import `transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.models.architectures import build_model, configure, fit_to_data, load_config
    from mars_hf.models.gpt2 import build_gpt2, gpt2_config
    from mars_hf.models.lean import make_lean

_HOME = {
    "build_gpt2": "mars_hf.models.gpt2",
    "build_model": "mars_hf.models.architectures",
    "configure": "mars_hf.models.architectures",
    "fit_to_data": "mars_hf.models.architectures",
    "gpt2_config": "mars_hf.models.gpt2",
    "load_config": "mars_hf.models.architectures",
    "make_lean": "mars_hf.models.lean",
}

__all__ = ["build_gpt2", "build_model", "configure", "fit_to_data", "gpt2_config", "load_config", "make_lean"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
