"""The state of one parameter: created, checked, brought to the parameter's device, dtype and memory layout."""

from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.hyper import Hyper
from mars_hf.optim.param_groups import name_of
from mars_hf.optim.rules import state_names
from mars_hf.optim.sharding import same_layout

State = dict[str, Any]


def check_state(state: State, p: Tensor, hyper: Hyper, group: dict[str, Any]) -> None:
    """Raises ValueError for state of another shape than a parameter of the group."""
    for key in state_names(hyper):
        if key != "step" and key in state and state[key].shape != p.shape:
            raise ValueError(
                f"{name_of(p, group)} has a state {key!r} of shape {tuple(state[key].shape)}: load the state of the "
                "same model"
            )


def prepare_state(state: State, p: Tensor, hyper: Hyper) -> None:
    """Creates what the rule needs and is not there yet, and follows a parameter that was converted."""
    for name in state_names(hyper):
        if name not in state:
            # torch's fused kernels read the step count on the device of the parameter.
            state[name] = (
                torch.zeros((), dtype=torch.float32, device=p.device)
                if name == "step"
                else torch.zeros_like(p, dtype=hyper.last_grad_dtype if name == "last_grad" else None)
            )
        elif name != "step" and not same_layout(state[name], p):  # say to channels_last
            state[name] = torch.empty_like(p, dtype=state[name].dtype).copy_(state[name])


def restore_state(state: State, p: Tensor, last_grad_dtype: torch.dtype | None) -> None:
    """After torch has loaded it, which casts all to the dtype of p and leaves the step count where it is."""
    for name in ("last_grad", "previous_grad"):
        if name in state:
            state[name] = state[name].to(last_grad_dtype or p.dtype)
    if "step" in state:
        state["step"] = state["step"].to(p.device)


def copy_grad(state: State, name: str, p: Tensor, last_grad_dtype: torch.dtype | None) -> None:
    """Copies p.grad into the state, elements that are not finite as 0; without a gradient there is no reference."""
    if p.grad is not None:
        if name not in state:
            state[name] = torch.zeros_like(p, dtype=last_grad_dtype)
        state[name].copy_(p.grad).nan_to_num_(0.0, 0.0, 0.0)
    elif name in state:
        state[name].zero_()
