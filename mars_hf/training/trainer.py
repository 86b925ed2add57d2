"""MARSTrainer: the Trainer, with a MARS optimizer."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments

from mars_hf.optim import MARS, mars_param_groups
from mars_hf.optim.validation import one_of
from mars_hf.training.arguments import OPTIM_NAMES, mars_arguments


def mars_optimizer(
    args: TrainingArguments, model: nn.Module | None, decay_names: Collection[str] | None
) -> tuple[type[MARS], dict[str, Any]]:
    """The optimizer class and its keyword arguments, `params` included where there is a model.

    Args:
        args: training arguments whose `optim` is one of `OPTIM_NAMES`.
        model: the model to train; only read.
        decay_names: the parameters that the Trainer decays; `mars_decay="authors"` decays by the authors' grouping.

    Raises:
        ValueError: exact mode, an engine that shards parameters, or hyperparameters that contradict each other.
    """
    hyper = mars_arguments(args)
    one_of("mars_decay", hyper.mars_decay, ("trainer", "authors"))
    rule = hyper.rule(str(getattr(args.optim, "value", args.optim)))
    if not hyper.is_approx:
        raise ValueError("is_approx=False: the Trainer computes one gradient per step, use MARS in a loop of your own")
    arguments = hyper.constructor_arguments(rule, args.learning_rate, args.weight_decay, args.adam_epsilon)
    if model is None:
        return MARS, arguments
    routing = ("lr", "mars_type", "betas", "weight_decay", "optimize_1d", "lr_1d", "betas_1d", "weight_decay_1d")
    groups = mars_param_groups(
        model,
        decay_names=decay_names if hyper.mars_decay == "trainer" else None,
        **{name: arguments[name] for name in routing},
    )
    return MARS, {"params": groups, **arguments}


def replicas(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """The ranks, where each of them holds the whole model and its gradients: DDP and DeepSpeed stage 0."""
    if accelerator.num_processes == 1 or not dist.is_initialized():
        return None
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 0:
        return dist.group.WORLD
    return dist.group.WORLD if kind.startswith("MULTI_") else None


class MARSTrainerMixin:
    """Gives any Trainer subclass the optimizers of `OPTIM_NAMES`: `class MyTrainer(MARSTrainerMixin, SFTTrainer)`.

    The training arguments are `MARSTrainingArguments`, or stock ones after `mars_hf.register()`. Weight decay groups
    are the Trainer's own (`get_decay_parameter_names`) unless `mars_decay="authors"`. The reference gradient is kept
    by the optimizer's own `step()`, so a step that a GradScaler skips leaves it alone. `optimizers=` and
    `optimizer_cls_and_kwargs=` take precedence, as in the Trainer.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Creates `self.optimizer`, once; see `Trainer.create_optimizer`.

        Raises:
            ValueError: see `mars_optimizer`.
        """
        trainer: Any = self
        if trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None and trainer.args.optim in OPTIM_NAMES:
            opt_model = trainer.model if model is None else model
            cls, arguments = mars_optimizer(trainer.args, opt_model, trainer.get_decay_parameter_names(opt_model))
            trainer.optimizer = cls(**arguments, process_group=replicas(trainer.accelerator))
        return super().create_optimizer(model)  # type: ignore[misc]


class MARSTrainer(MARSTrainerMixin, Trainer):
    """`transformers.Trainer` with a MARS optimizer; takes the arguments of the Trainer.

    Source: MARS, arXiv 2411.10438; MARS-M, arXiv 2510.21800.
    """
