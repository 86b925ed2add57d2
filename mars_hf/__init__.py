"""MARS optimizers for the Hugging Face ecosystem.

The names below load on first use: `from mars_hf import MARS` imports torch and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_hf.evaluation import LMEvalCallback
    from mars_hf.optim import MARS, mars_param_groups
    from mars_hf.training import MARSArguments, MARSTrainer, MARSTrainerMixin, MARSTrainingArguments, register

__version__ = "0.1.0"

_HOME = {
    "LMEvalCallback": "mars_hf.evaluation",
    "MARS": "mars_hf.optim",
    "mars_param_groups": "mars_hf.optim",
    "MARSArguments": "mars_hf.training",
    "MARSTrainer": "mars_hf.training",
    "MARSTrainerMixin": "mars_hf.training",
    "MARSTrainingArguments": "mars_hf.training",
    "register": "mars_hf.training",
}

__all__ = [
    "MARS",
    "LMEvalCallback",
    "MARSArguments",
    "MARSTrainer",
    "MARSTrainerMixin",
    "MARSTrainingArguments",
    "mars_param_groups",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
