"""One step of the optimizer: from the param groups and their gradients to the updates that `apply` runs."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.apply import NormBounds, Update
from mars_hf.optim.fused import check_fused
from mars_hf.optim.metrics import VarianceReduction
from mars_hf.optim.reference import ExactReference
from mars_hf.optim.rules import squared_norms, state_names
from mars_hf.optim.sharding import GroupTensors, Sharding, whole_norms
from mars_hf.optim.tensors import check_parameter, gradient_like, name_in, name_of, place_of, same_layout


class Step(ExactReference):
    """`step()`: finds the layout of the tensors, creates their state, and has the rule of each group applied.

    Beside param groups and state it uses memories of this process, which no state_dict, copy or pickle holds: they
    start without it.
    """

    metrics: VarianceReduction | None = None
    _tensors: GroupTensors
    _bounds: NormBounds

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, bs: int | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss.
            bs: accepted and unused, as in the authors' template.

        Returns:
            What `closure` returned, or None.

        Raises:
            ValueError: a sparse gradient, a parameter flattened after routing, or in exact mode a reference gradient
                that was not renewed since the step before. Nothing is modified then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, *same) for group in self.param_groups for same in self._layouts(group)]
        if self.defaults["fused"]:
            for group in self.param_groups:  # their options may come from a checkpoint
                check_fused(group)
        self._warn_of_overwritten_lr()
        metrics = self.metrics
        updates = [update for item in work if (update := self._update(*item)) is not None]
        if metrics is not None and metrics.measures:
            metrics.measure(updates)
        norms = whole_norms([update.sharding for update in updates], [update.squares() for update in updates])
        for update, its_norms in zip(updates, norms):
            update.finish(its_norms)
        if updates or not work:
            for group in self._exact_groups():
                group["last_grad_is_used"] = True
        return loss

    def _with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """The parameters of a group that have a gradient, checked; modifies nothing."""
        if group["last_grad_is_used"]:
            raise ValueError(
                "step() in exact mode has no reference gradient for this batch: call update_previous_grad() before "
                "and update_last_grad() after each step()"
            )
        params = []
        for i, p in enumerate(group["params"]):
            if p.grad is None or p.numel() == 0:
                continue
            if p.grad.layout != torch.strided:
                raise ValueError(f"{name_of(p, group, i)} has a sparse gradient: build its embedding with sparse=False")
            params.append(p)
        return params

    def _layouts(self, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], Sharding]]:
        """The parameters of a group that have a gradient, by layout, checked; modifies nothing."""
        memory = self._memory()
        for same, sharding in memory.by_layout(group, self._with_gradients(group), partial(name_in, group)):
            for p in same:
                if not memory.is_flat(p) and "exp_avg" not in self.state.get(p, ()):
                    check_parameter(p, group, place_of(p, group))
            yield same, sharding

    def _update(self, group: dict[str, Any], params: list[Tensor], sharding: Sharding) -> Update | None:
        """The coming update of parameters that share a layout; creates their state and counts the step."""
        names = state_names(group)
        is_first = not any("exp_avg" in self.state.get(p, ()) for p in params)
        for p in params:
            self._init_state(p, names, group["last_grad_dtype"])
        grads = sharding.parts([gradient_like(p) for p in params])
        if is_first and self._is_dry_run(group, params, grads, sharding):
            return None  # and the step does not count
        states = [self.state[p] for p in params]
        if "step" in names:
            torch._foreach_add_([state["step"] for state in states], 1)
        state = {name: sharding.parts([state[name] for state in states]) for name in names}
        # Only a memory of norms.
        bounds = self.__dict__.setdefault("_bounds", NormBounds())
        return Update(sharding.parts(params), grads, state, group, sharding, bounds, bool(self.defaults["fused"]))

    def _memory(self) -> GroupTensors:
        return self.__dict__.setdefault("_tensors", GroupTensors())

    def _is_dry_run(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], sharding: Sharding) -> bool:
        """Whether the caller only wants to see the state: a first step with gradients all zero that cannot be real.

        torch.distributed.checkpoint steps once like this, with lr 0, and DeepSpeed's stage 0 in bfloat16 before
        training, with the real lr and whole tensors of its own in place of ours. The flat tensors of ZeRO are stepped
        in training alone, and one of them may well have no gradient but zeros at first, say the A matrices of LoRA.
        """
        memory = self._memory()
        if memory.is_flat(params[0]):
            return False
        if group["lr"] != 0 and (not sharding.whole or memory.holds_any(group, params)):
            return False
        (norms,) = whole_norms([sharding], [torch.stack(squared_norms(grads))])
        return norms is not None and not norms.any()

    def _init_state(self, p: Tensor, names: tuple[str, ...], last_grad_dtype: torch.dtype | None) -> None:
        state = self.state[p]
        for name in names:
            if name not in state:
                # torch's fused kernels read the step count on the device of the parameter.
                state[name] = (
                    torch.zeros((), dtype=torch.float32, device=p.device)
                    if name == "step"
                    else torch.zeros_like(p, dtype=last_grad_dtype if name == "last_grad" else None)
                )
            elif name != "step" and not same_layout(state[name], p):  # p was converted, say to channels_last
                state[name] = torch.empty_like(p, dtype=state[name].dtype).copy_(state[name])

    def _warn_of_overwritten_lr(self) -> None:
        lrs = {group["lr"] for group in self.param_groups}
        # DeepSpeed steps one group at a time, with only that one in param_groups.
        shown = len(self.param_groups) == len(self._memory())
        if self.__dict__.get("_lrs_differed") and shown and len(lrs) == 1 and lrs != {0.0}:
            warnings.warn(
                "every param group has the same lr, although they started with different ones (lr and lr_1d): a loop "
                "that writes one lr into every group should scale each group's own lr instead",
                stacklevel=5,
            )
