"""One step of the optimizer: from the param groups and their gradients to the updates that `apply` runs."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.apply import NormBounds, Update
from mars_hf.optim.fused import check_fused, squared_norms_of_g
from mars_hf.optim.metrics import VarianceReduction
from mars_hf.optim.reference import ExactReference
from mars_hf.optim.rules import MARS_RULES, MATRIX_RULES, squared_norms, state_names
from mars_hf.optim.sharding import GroupTensors, Sharding, whole_norms
from mars_hf.optim.tensors import check_parameter, gradient_like, name_in, name_of, place_of, same_layout

# Tensors of fewer elements are measured in less time than it takes to look up what is known of their norm.
SMALL = 2**16


class Step(ExactReference):
    """`step()`: finds the layout of the tensors, creates their state, and has the rule of each group applied.

    Beside param groups and state it uses memories of this process, which no state_dict, copy or pickle holds: they
    start without it.
    """

    metrics: VarianceReduction | None = None
    # Of a clip whose step is still to come: its factor, and for each parameter that it left to the compiled pass the
    # gradient, its version, and its norm after the clip (nan: not noted).
    _grad_scale = 1.0
    _unscaled: Mapping[Tensor, tuple[Tensor, int, float]] = MappingProxyType({})
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
                that was not renewed since the step before; a gradient changed in place after `clip_grad_norm_`. Nothing
                is modified then.
        """
        loss = None
        if closure is not None:
            self._scale_gradients()  # the closure may add to them
            with torch.enable_grad():
                loss = closure()
        work = [(group, *same) for group in self.param_groups for same in self._layouts(group)]
        if self.defaults["fused"]:
            for group in self.param_groups:  # their options may come from a checkpoint
                check_fused(group)
        self._warn_of_overwritten_lr()
        self._check_unchanged()
        metrics = self.metrics
        measures = metrics is not None and metrics.measures
        if measures or not self._all_unscaled([p for group, same, _ in work if self._read_once(group) for p in same]):
            self._scale_gradients()
        updates = [update for item in work if (update := self._update(*item)) is not None]
        if metrics is not None and measures:
            metrics.measure(updates)
        norms = whole_norms([update.sharding for update in updates], [update.squares() for update in updates])
        for update, its_norms in zip(updates, norms):
            update.finish(its_norms)
        self._forget_clip()
        if updates or not work:
            for group in self._exact_groups():
                group["last_grad_is_used"] = True
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of all parameters by their global 2-norm, for the `step()` that follows.

            g = g min(1, max_norm / (||all g||_2 + 1e-6))

        The update is that after `torch.nn.utils.clip_grad_norm_`, which this calls, except with `fused=True`: the
        compiled passes of approx mode multiply when they read the gradients, which saves a pass that writes them. Their
        `p.grad` stay as they are, also after the step. So call it last: gradients may be replaced between the two, but
        not changed in place (through `.data` or NumPy nobody would notice).

        Args:
            max_norm: the largest norm.

        Returns:
            The norm before the clip, of shape ().

        Raises:
            ValueError: `max_norm` is not positive, a parameter that `fused=True` does not serve any more, or a gradient
                that was changed in place since the last clip. Nothing is modified then.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r} must be positive: leave the call out for no clip")
        self._scale_gradients()
        late: list[Tensor] = []
        at_once: list[Tensor] = []
        for group in self.param_groups:
            if self._read_once(group):
                check_fused(group)
            with_gradient = [p for p in group["params"] if p.grad is not None]
            (late if self._read_once(group) else at_once).extend(with_gradient)
        grads = [p.grad for p in [*late, *at_once] if p.grad is not None]
        ordinary = all(type(g) is Tensor and g.layout == torch.strided and not g.is_inference() for g in grads)
        if not late or not ordinary or self.metrics is not None:
            return torch.nn.utils.clip_grad_norm_([*late, *at_once], max_norm)
        norms = self._norms(late)
        total = torch.nn.utils.get_total_norm([norms, *grads[len(late) :]])
        torch.nn.utils.clip_grads_with_norm_(at_once, max_norm, total)
        self._grad_scale = scale = float((max_norm / (total + 1e-6)).clamp(max=1.0))
        noted = (norm * scale if p.numel() >= SMALL else math.nan for p, norm in zip(late, norms.tolist()))
        self._unscaled = {p: (g, g._version, norm) for p, g, norm in zip(late, grads, noted)}
        return total.to(reduce(torch.promote_types, (g.dtype for g in grads)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; see `torch.optim.Optimizer.zero_grad`."""
        self._forget_clip()
        super().zero_grad(set_to_none)

    def _forget_clip(self) -> None:
        self._grad_scale, self._unscaled = 1.0, {}

    def _scale_gradients(self) -> None:
        """Does in place what a clip has left to the compiled pass, for the gradients that are still there."""
        self._check_unchanged()
        for p, (g, *_) in self._unscaled.items():
            if p.grad is g:
                g.mul_(self._grad_scale)
        self._forget_clip()

    def _check_unchanged(self) -> None:
        """Raises ValueError where a gradient that a clip left as it was has been changed in place."""
        for p, (g, version, _) in self._unscaled.items():
            if p.grad is g and g._version != version:
                raise ValueError(
                    f"clip_grad_norm_(): the gradient of shape {tuple(g.shape)} was changed after it: clip between the "
                    "last backward() and step(), or use torch.nn.utils.clip_grad_norm_"
                )

    def _all_unscaled(self, params: list[Tensor]) -> bool:
        """Whether a clip left the gradients of exactly these parameters to the compiled pass, or of none at all."""
        unscaled = self._unscaled
        known = (unscaled.get(p, (None,))[0] is p.grad for p in params)
        return not unscaled or (len(unscaled) >= len(params) and all(known))

    def _norms(self, params: list[Tensor]) -> Tensor:
        """||g|| of each, by the compiled pass."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, p in enumerate(params):
            by_dtype.setdefault(p.dtype, []).append(i)
        squares = torch.empty(len(params), dtype=torch.float64)
        for places in by_dtype.values():
            squares[places] = squared_norms_of_g([gradient_like(params[i]) for i in places])
        return squares.sqrt()

    def _norms_found(self, params: list[Tensor]) -> list[float] | None:
        """||g|| of each after the clip, nan where `clip_grad_norm_` did not note it; None: nowhere."""
        return [self._unscaled[p][2] for p in params] if self._unscaled else None

    def _read_once(self, group: dict[str, Any]) -> bool:
        """Whether a step reads the gradients of a group in a compiled pass alone, and no later step does."""
        compiled = self.defaults["fused"] and group["rule"] in MARS_RULES
        return compiled and group["is_approx"] and not (group["memory_efficient"] and group["rule"] in MATRIX_RULES)

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
        fuse, late = bool(self.defaults["fused"]), self._read_once(group)
        scale = self._grad_scale if late else 1.0
        g_norms = self._norms_found(params) if late else None
        return Update(sharding.parts(params), grads, state, group, sharding, bounds, fuse, scale, g_norms)

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
