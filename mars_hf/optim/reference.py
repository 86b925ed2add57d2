"""The reference gradient of exact mode, which the caller computes: a batch ahead, or at the previous parameters."""

from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.rules import state_names

# Where exact mode stands between its three calls; kept in every param group, so that it survives the state_dict.
EXACT_PHASE = ("last_grad_is_used", "previous_grad_is_set")


class ExactReference(torch.optim.Optimizer):
    """The calls around `step()` in exact mode, in one of two ways.

    A batch ahead, as the authors' loop does: update_previous_grad, step, update_last_grad. Or at the previous
    parameters: swap_params, the gradient of the batch, set_last_grad, swap_params; the gradient again, keep_params,
    step. The second way costs as much and needs no batch ahead of time.
    """

    @torch.no_grad()
    def update_previous_grad(self) -> None:
        """Exact mode: keeps a copy of `p.grad`, the look-ahead gradient, as h of the step after the coming one.

        Elements that are not finite (an overflow under a GradScaler) are kept as 0, which means no reference. Does
        nothing in approx mode.

        Raises:
            ValueError: called between `step()` and `update_last_grad()`, or where no parameter has a gradient.
        """
        for group in self._exact_groups():
            if group["last_grad_is_used"]:
                raise ValueError("update_previous_grad() came after step(): call update_last_grad() first")
        if self._exact_groups() and all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "update_previous_grad() found no gradient: call it between backward() and zero_grad(); "
                "is_approx=False is not served under DeepSpeed, which keeps gradients to itself"
            )
        for group in self._exact_groups():
            for p in group["params"]:
                self._copy_grad(p, group, "previous_grad")
            group["previous_grad_is_set"] = True

    @torch.no_grad()
    def update_last_grad(self) -> None:
        """Exact mode: makes the gradient of `update_previous_grad()` the h of the next step.

        Call it once after each `step()`, also when a GradScaler skipped the step. Without an `update_previous_grad()`
        since the last call (the final iteration has no next batch) the next `step()` raises. Does nothing in approx
        mode.

        Raises:
            ValueError: neither `update_previous_grad()` nor `step()` was called since the last call.
        """
        for group in self._exact_groups():
            if not group["last_grad_is_used"] and not group["previous_grad_is_set"]:
                raise ValueError("update_last_grad() came first: call update_previous_grad() and step() before it")
        for group in self._exact_groups():
            if not group["previous_grad_is_set"]:
                continue
            for p in group["params"]:
                state = self.state.get(p, {})
                if "previous_grad" in state:
                    # The memory of the used h serves the next look-ahead.
                    used = state.get("last_grad", None)
                    state["last_grad"] = state["previous_grad"]
                    state["previous_grad"] = torch.zeros_like(state["last_grad"]) if used is None else used
                elif "last_grad" in state:
                    state["last_grad"].zero_()  # the look-ahead did not reach this parameter: no reference
            group["last_grad_is_used"] = group["previous_grad_is_set"] = False

    @torch.no_grad()
    def keep_params(self) -> None:
        """Keeps a copy of every parameter that is trained, as the previous parameters of the step after the coming one.

        The copies are part of the state (`previous_param`), in every param group: the gradient at the previous
        parameters needs all of them.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if "previous_param" in self.state.get(p, ()):
                    self.state[p]["previous_param"].copy_(p)
                elif p.grad is not None:
                    self.state[p]["previous_param"] = p.clone()

    @torch.no_grad()
    def swap_params(self) -> bool:
        """Exchanges the parameters and their kept copies; call it again to change back.

        Returns:
            Whether there are copies: there are none before the first step.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        kept = [(p, self.state[p]["previous_param"]) for p in params if "previous_param" in self.state.get(p, ())]
        for p, previous in kept:
            current = p.clone()
            p.copy_(previous)
            previous.copy_(current)
        return bool(kept)

    @torch.no_grad()
    def set_last_grad(self) -> None:
        """Exact mode: makes a copy of `p.grad`, taken at the previous parameters, the h of the coming step.

        Elements that are not finite (an overflow under a GradScaler) become 0, which means no reference. Does nothing
        in approx mode.
        """
        for group in self._exact_groups():
            for p in group["params"]:
                self._copy_grad(p, group, "last_grad")
            group["last_grad_is_used"] = False

    def needs_reference(self) -> bool:
        """Whether any param group is in exact mode and keeps a reference gradient."""
        return bool(self._exact_groups())

    def _copy_grad(self, p: Tensor, group: dict[str, Any], name: str) -> None:
        """Copies p.grad into the state, elements that are not finite as 0; without a gradient there is no reference."""
        if p.grad is None:
            if name in self.state.get(p, ()):
                self.state[p][name].zero_()
            return
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p, dtype=group["last_grad_dtype"])
        state[name].copy_(p.grad).nan_to_num_(0.0, 0.0, 0.0)

    def _exact_groups(self) -> list[dict[str, Any]]:
        return [g for g in self.param_groups if not g["is_approx"] and "last_grad" in state_names(g)]
