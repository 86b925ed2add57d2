"""`--optim mars` for stock TrainingArguments and Trainer, and for their subclasses."""

from functools import wraps
from typing import Any

from transformers import Trainer, trainer
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext
from transformers.training_args import OptimizerNames

from mars_hf.optim import MARS
from mars_hf.training.arguments import OPTIM_NAMES, optim_name
from mars_hf.training.engines import prepare_engine
from mars_hf.training.trainer import mars_optimizer


def register() -> None:
    """Adds mars, mars_adamw, mars_lion, mars_shampoo and mars_m to the optimizers of transformers.

    Afterwards `TrainingArguments(optim="mars", optim_args="gamma=0.025,lr_1d=3e-3")`, `--optim mars` on the command
    line of any script that uses `HfArgumentParser`, and the stock `Trainer` and its subclasses work. Call it before the
    arguments are parsed. A second call changes nothing; every other optimizer name keeps its meaning.

    A saved `training_args.bin` holds the plain string, so that it loads where mars_hf is not installed.
    """
    for value in OPTIM_NAMES:
        if value not in OptimizerNames._value2member_map_:
            _add_member(value.upper(), value)
        # The hash of a member is that of its name, not of its value, so each needs its entry.
        _OPTIMIZER_HANDLERS[OptimizerNames(value)] = _mars_handler
        _OPTIMIZER_HANDLERS[value] = _mars_handler
    if not hasattr(trainer.deepspeed_init, "__wrapped__"):
        trainer.deepspeed_init = _checked(trainer.deepspeed_init)


def _mars_handler(context: OptimizerContext) -> tuple[type[MARS], dict[str, Any]]:
    model = context.model
    # The method reads nothing from the Trainer, and a handler is given none.
    decay_names = None if model is None else Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    return mars_optimizer(context.args, model, decay_names)


def _checked(deepspeed_init: Any) -> Any:
    """The Trainer's preparation of DeepSpeed, behind the check of the engine.

    With an `optimizer` block in DeepSpeed's configuration no handler is ever asked, and MARS would be gone.
    """

    @wraps(deepspeed_init)
    def checked(trainer: Trainer, num_training_steps: int, inference: bool = False) -> Any:
        if not inference and optim_name(trainer.args) in OPTIM_NAMES:
            prepare_engine(trainer.args, trainer.model)
        return deepspeed_init(trainer, num_training_steps, inference)

    return checked


def _add_member(name: str, value: str) -> None:
    """Adds a member to OptimizerNames, which has no public way to do so."""
    member = str.__new__(OptimizerNames, value)
    member._name_, member._value_ = name, value
    # Pickles and deep copies of arguments hold the string, which TrainingArguments accepts as well.
    member.__reduce_ex__ = lambda protocol: (str, (value,))  # type: ignore[method-assign, assignment]
    OptimizerNames._member_map_[name] = member
    OptimizerNames._member_names_.append(name)
    OptimizerNames._value2member_map_[value] = member
    type.__setattr__(OptimizerNames, name, member)
