"""What an evaluation must leave as it found it: random states, training mode, the user's terminal."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restores the random states of Python, NumPy, torch and every CUDA device on leaving."""
    # Asking an idle CUDA for its state would initialise it; an uninitialised one has no state to lose.
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda_states)


@contextmanager
def same_training_mode(model: nn.Module) -> Iterator[None]:
    """Restores `training` of every submodule on leaving; some may be held in eval mode within a model in training.

    Args:
        model: The model an evaluation switches to eval mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def no_caches_left(model: nn.Module) -> Iterator[None]:
    """Drops on leaving what a forward pass without gradients keeps for the next one, which may need gradients.

    Under FSDP2 the root keeps its parameters whole until a backward pass; a step before the next forward pass would go
    unnoticed. Autocast keeps its casts of the weights, without their gradients.

    Args:
        model: The model an evaluation runs.
    """
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for module in model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps lm-eval, datasets and transformers from logging below errors and from drawing progress bars."""
    import datasets
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface
    import transformers

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    datasets_bars = not datasets.are_progress_bars_disabled()
    transformers_bars = transformers.utils.logging.is_progress_bar_enabled()
    # lm-eval offers no switch for its progress bars, so its modules see a tqdm that draws nothing.
    modules: list[Any] = [lm_eval.api.task, lm_eval.api.model, lm_eval.models.huggingface]
    bars = [module.tqdm for module in modules]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
        for module, bar in zip(modules, bars):
            module.tqdm = _silent(bar)
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if datasets_bars:
            datasets.enable_progress_bars()
        if transformers_bars:
            transformers.utils.logging.enable_progress_bar()
        for module, bar in zip(modules, bars):
            module.tqdm = bar


def _silent(bar: Any) -> Any:
    def silent(*args: Any, **kwargs: Any) -> Any:
        return bar(*args, **{**kwargs, "disable": True})

    return silent
