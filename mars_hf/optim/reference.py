"""The reference gradient of exact mode, which the caller computes one batch ahead."""

from typing import Any

import torch

from mars_hf.optim.rules import state_names

# Where exact mode stands between its three calls; kept in every param group, so that it survives the state_dict.
EXACT_PHASE = ("last_grad_is_used", "previous_grad_is_set")


class ExactReference(torch.optim.Optimizer):
    """The calls around `step()` in exact mode: update_previous_grad, step, update_last_grad."""

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
                if p.grad is None:
                    if "previous_grad" in self.state.get(p, ()):
                        self.state[p]["previous_grad"].zero_()
                    continue
                state = self.state[p]
                if "previous_grad" not in state:
                    state["previous_grad"] = torch.zeros_like(p, dtype=group["last_grad_dtype"])
                state["previous_grad"].copy_(p.grad).nan_to_num_(0.0, 0.0, 0.0)
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

    def _exact_groups(self) -> list[dict[str, Any]]:
        return [g for g in self.param_groups if not g["is_approx"] and "last_grad" in state_names(g)]
