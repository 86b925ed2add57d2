"""Exact mode in the Trainer: the gradient of the current batch at the previous parameters.

The authors' loop looks ahead: before the step at x_t it differentiates the next batch at x_t and keeps that gradient.
Here the previous parameters are kept and swapped in, and the current batch is differentiated there, for these reasons:

- memory: one copy more either way, of the parameters here, of the gradient there;
- the end of an epoch: the next batch belongs to another epoch, whose data loader does not exist yet;
- resume: x_{t-1} is part of the optimizer's state, so a checkpoint holds all there is to know; a batch that was fetched
  ahead would have to be fetched again;
- the end of the run: the gradient of a batch that is never trained on is wasted, here none is computed.

Both give the same h. The cost is one gradient more a step, from the second step on.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from mars_hf.optim import MARS


class ReferenceGradient(TrainerCallback):
    """Computes h before the gradient of each step, and leaves the Trainer as it was.

    Args:
        trainer: whose `training_step` computes gradients, and whose `micro_batches` are those of the coming step.
        optimizer: in exact mode.
    """

    def __init__(self, trainer: Any, optimizer: MARS) -> None:
        self._trainer, self.optimizer = trainer, optimizer
        # A step that a GradScaler skips does not get here, and keeps the older parameters.
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: keep_params(optimizer))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Differentiates the micro-batches of the coming step at the previous parameters.

        The Trainer calls this once a step, with the batches fetched and the random state restored, and before it stops
        the gradients from being reduced for all micro-batches but the last.
        """
        if not swap_params(self.optimizer):
            return
        model = self._trainer.model_wrapped
        try:
            with _unchanged(model, args.device):
                self._gradient(model)
        finally:
            swap_params(self.optimizer)
        self.optimizer.set_last_grad()
        model.zero_grad()

    def _gradient(self, model: nn.Module) -> None:
        """The clipped gradient of the step, as the Trainer will compute it."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        batches, num_items = trainer.micro_batches
        reduces_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        syncs = accelerator.gradient_state.sync_gradients
        for i, inputs in enumerate(batches):
            is_last = i == len(batches) - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last or reduces_each else accelerator.no_sync(model):
                trainer.training_step(model, inputs, num_items)
        accelerator.gradient_state._set_sync_gradients(syncs)
        max_norm = trainer.args.max_grad_norm
        if accelerator.scaler is None:
            if max_norm > 0:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            return
        # Accelerate would unscale by the GradScaler, which allows that once a step.
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_div_(grads, accelerator.scaler.get_scale())
        if max_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)


@torch.no_grad()
def keep_params(optimizer: MARS) -> None:
    """Keeps a copy of every parameter that is trained, as the previous parameters of the step after the coming one.

    The copies are part of the optimizer's state (`previous_param`), in every param group: the gradient at the previous
    parameters needs all of them.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if "previous_param" in optimizer.state.get(p, ()):
            optimizer.state[p]["previous_param"].copy_(p)
        elif p.grad is not None:
            optimizer.state[p]["previous_param"] = p.clone()


@torch.no_grad()
def swap_params(optimizer: MARS) -> bool:
    """Exchanges the parameters and their kept copies; call it again to change back.

    Returns:
        Whether there are copies: there are none before the first step.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, optimizer.state[p]["previous_param"]) for p in params if "previous_param" in optimizer.state.get(p, ())]
    for p, previous in kept:
        current = p.clone()
        p.copy_(previous)
        previous.copy_(current)
    return bool(kept)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leaves every random number generator and the buffers of the model as they were.

    The gradient that follows then draws the same dropout masks, and moving averages count a batch once.
    """
    python, numpy = random.getstate(), np.random.get_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
