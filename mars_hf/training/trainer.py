"""MARSTrainer: the Trainer, with a MARS optimizer."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from mars_hf.optim import MARS, mars_param_groups
from mars_hf.optim.hyper import one_of
from mars_hf.training.arguments import OPTIM_NAMES, mars_arguments, optim_name
from mars_hf.training.callbacks import VarianceMetrics
from mars_hf.training.card import CardDetails, complete_card
from mars_hf.training.checkpoints import (
    FSDP_SHARDED,
    ZERO_FORMATS,
    check_complete,
    check_format,
    checkpoint_to_resume,
)
from mars_hf.training.engines import prepare_engine, replicas, running_format
from mars_hf.training.exact import ReferenceGradient


def mars_optimizer(
    args: TrainingArguments,
    model: nn.Module | None,
    decay_names: Collection[str] | None,
    *,
    own_trainer: bool = False,
) -> tuple[type[MARS], dict[str, Any]]:
    """The optimizer class and its keyword arguments, `params` included where there is a model.

    Args:
        args: training arguments whose `optim` is one of `OPTIM_NAMES`.
        model: the model to train; only read.
        decay_names: the parameters that the Trainer decays; `mars_decay="authors"` decays by the authors' grouping.
        own_trainer: whether the Trainer at hand computes the second gradient of exact mode and logs `mars_metrics`.

    Raises:
        ValueError: exact mode or `mars_metrics` without `own_trainer`, an engine that is not served, or
            hyperparameters that contradict each other.
    """
    hyper = mars_arguments(args)
    one_of("mars_decay", hyper.mars_decay, ("trainer", "authors"))
    rule = hyper.rule(optim_name(args))
    if hyper.mars_metrics and not own_trainer:
        raise ValueError("mars_metrics=True: this Trainer logs its own values alone, use mars_hf.MARSTrainer")
    if not hyper.is_approx and not own_trainer:
        raise ValueError("is_approx=False: this Trainer computes one gradient per step, use mars_hf.MARSTrainer")
    prepare_engine(args, model)
    if not hyper.is_approx and running_format() in ZERO_FORMATS:
        raise ValueError("is_approx=False is not served under DeepSpeed: launch DDP or FSDP2, or use is_approx=True")
    arguments = hyper.constructor_arguments(rule, args.learning_rate, args.weight_decay, args.adam_epsilon)
    arguments["process_group"] = replicas()
    if model is None:
        return MARS, arguments
    routing = ("lr", "mars_type", "betas", "weight_decay", "optimize_1d", "lr_1d", "betas_1d", "weight_decay_1d")
    groups = mars_param_groups(
        model,
        decay_names=decay_names if hyper.mars_decay == "trainer" else None,
        **{name: arguments[name] for name in routing},
    )
    return MARS, {"params": groups, **arguments}


class MARSTrainerMixin:
    """Gives any Trainer subclass the optimizers of `OPTIM_NAMES`: `class MyTrainer(MARSTrainerMixin, SFTTrainer)`.

    The training arguments are `MARSTrainingArguments`, or stock ones after `mars_hf.register()`. Weight decay groups
    are the Trainer's own (`get_decay_parameter_names`) unless `mars_decay="authors"`. The reference gradient is kept
    by the optimizer's own `step()`, so a step that a GradScaler skips leaves it alone. `optimizers=` and
    `optimizer_cls_and_kwargs=` take precedence, as in the Trainer.

    `card_details` is what the model card tells besides the settings; set it before `push_to_hub()`.
    """

    card_details = CardDetails()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `Trainer.train`.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the newest complete one of `output_dir`.

        Raises:
            ValueError: an engine that MARS does not serve, or a checkpoint that lacks something or was saved by another
                engine.
        """
        trainer: Any = self
        if self._optimizer_is_mars():
            # Before the engine is made: with an optimizer of its own DeepSpeed would never ask for ours.
            prepare_engine(trainer.args, trainer.model)
            if resume_from_checkpoint is True:
                resume_from_checkpoint = checkpoint_to_resume("true", trainer.args.output_dir)
            if resume_from_checkpoint:
                check_complete(resume_from_checkpoint)
                check_format(resume_from_checkpoint, running_format(), trainer.args.world_size, trainer.args.bf16)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Creates `self.optimizer`, once; see `Trainer.create_optimizer`.

        Raises:
            ValueError: see `mars_optimizer`.
        """
        trainer: Any = self
        if trainer.optimizer is None and self._optimizer_is_mars():
            opt_model = trainer.model if model is None else model
            decay_names = trainer.get_decay_parameter_names(opt_model)
            cls, arguments = mars_optimizer(trainer.args, opt_model, decay_names, own_trainer=True)
            trainer.optimizer = cls(**arguments)
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if isinstance(optimizer, MARS):
            # Gradients come unscaled here, and Accelerate takes any call of step() for a step that was made.
            optimizer._step_supports_amp_scaling = False
            self._add_callbacks(optimizer)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips the gradients; see `Trainer._clip_grad_norm`.

        With `mars_fused` they are not rewritten: the optimizer divides them in its own pass, and `p.grad` stays as it
        was before the clip. DeepSpeed clips by itself.
        """
        trainer: Any = self
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        takes_scale = isinstance(optimizer, MARS) and optimizer.defaults["fused"]
        if not takes_scale or trainer.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        trainer.accelerator.unscale_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.grad_scale = torch.clamp((norm + 1e-6) / trainer.args.max_grad_norm, min=1.0)
        return norm

    def _add_callbacks(self, optimizer: MARS) -> None:
        """Those that the optimizer needs, once for each optimizer."""
        trainer: Any = self
        known = [c for c in trainer.callback_handler.callbacks if isinstance(c, (ReferenceGradient, VarianceMetrics))]
        if any(callback.optimizer is optimizer for callback in known):
            return
        if optimizer.needs_reference():
            trainer.add_callback(ReferenceGradient(trainer, optimizer))
        if mars_arguments(trainer.args).mars_metrics:
            trainer.add_callback(VarianceMetrics(optimizer))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; see `Trainer.log`. With `mars_metrics` the training loss brings them along."""
        trainer: Any = self
        if "loss" in logs:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, VarianceMetrics):
                    logs = {**logs, **callback.read()}
        super().log(logs, start_time)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Fetches the micro-batches of a step; see `Trainer.get_batch_samples`. Kept for the second gradient."""
        self.micro_batches = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        return self.micro_batches

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model for `from_pretrained`; see `Trainer.save_model`.

        Under FSDP with SHARDED_STATE_DICT too, where the Trainer would write no weights. Checkpoints (`_internal_call`)
        stay sharded there.
        """
        trainer: Any = self
        if not _internal_call and trainer.is_fsdp_enabled and running_format() == FSDP_SHARDED:
            trainer._save(output_dir, state_dict=trainer.accelerator.get_state_dict(trainer.model))
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes README.md in `output_dir`, as `push_to_hub()` does; see `Trainer.create_model_card`.

        The metadata are the Trainer's, the text is that of `complete_card`, with `card_details`.
        """
        trainer: Any = self
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        if trainer.is_world_process_zero():
            complete_card(Path(trainer.args.output_dir) / "README.md", trainer, trainer.card_details)

    def _optimizer_is_mars(self) -> bool:
        """Whether `optim` decides, and says MARS."""
        trainer: Any = self
        given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if trainer.optimizer_cls_and_kwargs is not None or not (given is None or isinstance(given, MARS)):
            return False
        return optim_name(trainer.args) in OPTIM_NAMES


class MARSTrainer(MARSTrainerMixin, Trainer):
    """`transformers.Trainer` with a MARS optimizer; takes the arguments of the Trainer.

    Source: MARS, arXiv 2411.10438; MARS-M, arXiv 2510.21800.
    """
