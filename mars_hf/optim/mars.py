"""The MARS optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mars_hf.optim.compiled import COMPILED, check_served
from mars_hf.optim.hyper import Hyper, one_of
from mars_hf.optim.metrics import VarianceReduction
from mars_hf.optim.param_groups import (
    check_parameter,
    check_rules,
    finished_groups,
    name_of,
    tensor_of,
    warn_of_one_lr,
)
from mars_hf.optim.rules import MARS_RULES, RULES, Numbers, Tensors, state_names
from mars_hf.optim.sharding import GroupTensors, Sharding, gradient_like
from mars_hf.optim.state import check_state, copy_grad, prepare_state, restore_state
from mars_hf.optim.update import EAGER, Update, apply_, clipped_updates, is_dry_run

# Of the arguments these only say how plain parameters are split, and `fused` how fast, not what: no group holds them.
_IN_NO_GROUP = ("mars_type", "lr_1d", "betas_1d", "weight_decay_1d", "fused")
_DTYPES = ("last_grad_dtype", "ns_dtype")
# Where exact mode stands between its three calls; kept in every param group, so that it survives the state_dict.
_EXACT_PHASE = ("last_grad_is_used", "previous_grad_is_set")

Group = dict[str, Any]


class MARS(torch.optim.Optimizer):
    r"""MARS: variance-reduced AdamW, Lion, Shampoo and Muon, and the baselines AdamW and Muon.

    With g the gradient (after any global clipping), h the reference gradient and alpha = gamma beta1 / (1 - beta1):

        c = g + alpha (g - h);   c = c / max(1, ||c||_2 / clip_c)   (norm of the whole tensor)
        m = beta1 m + (1 - beta1) c

        mars-adamw    v = beta2 v + (1 - beta2) c^2;  AdamW with m and v
        mars-lion     p -= lr (wd p + sign(m))
        mars-shampoo  p -= lr (wd p + max(1, rows / cols)^0.5 NS5(m / (1 - beta1)))
        mars-m        p -= lr (wd p + 0.2 sqrt(max(rows, cols)) NS5(m))
        adamw         AdamW on g
        muon          b = beta1 b + g;  p -= lr (wd p + max(1, rows / cols)^0.5 NS5(g + beta1 b))
        moonlight     as muon with 0.2 sqrt(max(rows, cols)) before NS5

    Parameters with ndim < 2 are updated by AdamW on g with `lr_1d`, `betas_1d` and `weight_decay_1d`, in param groups
    of their own. h is the gradient of the step before (`is_approx=True`), or the gradient of the current batch at the
    previous parameters (`is_approx=False`), which the caller computes:

        loss(next_batch).backward();  optimizer.update_previous_grad();  optimizer.zero_grad()
        loss(batch).backward();       optimizer.step();                  optimizer.zero_grad()
        optimizer.update_last_grad()

    At the first step h = 0, as in the authors' code. In approx mode update_previous_grad and update_last_grad do
    nothing, so one training loop serves both. Clip both gradients by the same global norm before handing them over;
    under a GradScaler divide the gradients of the look-ahead by `scaler.get_scale()` yourself (`scaler.unscale_` may be
    called once per step). `step()` modifies the parameters and the state in place and never writes `p.grad`.

    Parameters without a gradient are skipped; their own step count starts when they first have one. A
    `VarianceReduction()` in the attribute `metrics` measures what the variance reduction does.

    Args:
        params: parameters, named parameters or param groups. Plain parameters are split by ndim. A group with its own
            `rule` (one of the names above) is taken as it is, with its own lr, betas and weight_decay;
            `mars_param_groups(model)` builds such groups, and knows the embeddings and Conv1D weights that mars-m,
            muon, moonlight and mars-shampoo must treat in a special way (`transposed=True` in a group of Conv1D
            weights, `stacked=True` of experts). Any argument below can be overridden in a group.
        lr: learning rate of the matrices, per optimizer step; a float.
        betas: coefficients of the first and the second moment.
        eps: added to the denominator; in mars-shampoo to the Frobenius norm.
        weight_decay: decoupled weight decay of the matrices, multiplied by lr at each step.
        amsgrad: uses the running maximum of v, in mars-adamw and wherever AdamW applies.
        gamma: strength of the variance reduction; 0 is none.
        is_approx: see above.
        mars_type: one of the names above.
        optimize_1d: gives parameters with ndim < 2 the MARS rule too (mars-adamw's for mars-shampoo and mars-m), with
            the matrices' lr, betas and weight_decay.
        lr_1d: learning rate of AdamW-ruled parameters. None: 3e-3; for mars-m, moonlight and adamw `lr`. In a group
            with another `lr` it is scaled by the same factor.
        betas_1d: their betas. None: (0.9, 0.95); for adamw `betas`.
        weight_decay_1d: their weight decay, also where their param group says another `weight_decay` (the authors' code
            decays layer norm gains so). None: 0.1; for mars-m, moonlight and adamw `weight_decay`.
        clip_c: threshold for the norm of each tensor's c; None does not clip. The authors' loops sum the losses of the
            micro-batches where the Trainer averages: with k micro-batches theirs is `clip_c=1/k` here.
        memory_efficient: mars-lion, mars-shampoo and mars-m without a stored h: exactly the same updates, needs
            is_approx=True and clip_c=None.
        last_grad_dtype: dtype in which h is kept, e.g. torch.bfloat16; None: that of the parameter.
        ns_steps: Newton-Schulz steps.
        ns_dtype: dtype of the Newton-Schulz products.
        nesterov: of muon and moonlight.
        process_group: ranks that hold the same parameters and gradients (DistributedDataParallel): they divide the
            Newton-Schulz work among them. None: each process does all of it. FSDP2 and DeepSpeed ZeRO, whose ranks
            hold shards, are recognised by themselves, and there every rank must step together.
        fused: True runs the MARS rules through torch.compile, one pass over memory for each large tensor: the same
            update, faster. It serves float16 to float64 on CPU (with a C++ compiler, g++) and CUDA, for all groups, and
            compiles for some seconds at the first step. Not part of the state_dict.

    `step()` divides the gradients by the attribute `grad_scale` (a number or a 0-dim tensor), does nothing where the
    attribute `found_inf` is not 0, and consumes both, as torch's fused optimizers do; with fused=True a GradScaler sets
    them. So a global clip need not rewrite the gradients, and `p.grad` stays undivided:

        optimizer.grad_scale = torch.clamp((torch.nn.utils.get_total_norm(grads) + 1e-6) / max_norm, min=1.0)

    Raises:
        ValueError: a value out of range, a combination that no rule serves, a sparse or complex gradient, a parameter
            that was flattened or sharded after routing, no parameter at all for the rule of `mars_type`, a
            `process_group` without this rank, or fused=True where it cannot be served.

    Source: MARS, arXiv 2411.10438 (algorithms 1 to 4); MARS-M, arXiv 2510.21800; where these and the authors' code
    disagree, the code.
    """

    metrics: VarianceReduction | None = None
    _tensors: GroupTensors

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        gamma: float = 0.025,
        is_approx: bool = True,
        mars_type: str = "mars-adamw",
        optimize_1d: bool = False,
        lr_1d: float | None = None,
        betas_1d: tuple[float, float] | None = None,
        weight_decay_1d: float | None = None,
        *,
        clip_c: float | None = 1.0,
        memory_efficient: bool = False,
        last_grad_dtype: torch.dtype | None = None,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        nesterov: bool = True,
        process_group: dist.ProcessGroup | None = None,
        fused: bool = False,
    ) -> None:
        one_of("mars_type", mars_type, RULES)
        if not isinstance(fused, bool):
            raise ValueError(f"fused={fused!r} must be True or False")
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError("process_group: this rank is not in it, pass a group of ranks with the same parameters")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "gamma": gamma,
            "is_approx": is_approx,
            "mars_type": mars_type,
            "optimize_1d": optimize_1d,
            "lr_1d": lr_1d,
            "betas_1d": betas_1d,
            "weight_decay_1d": weight_decay_1d,
            "clip_c": clip_c,
            "memory_efficient": memory_efficient,
            "last_grad_dtype": last_grad_dtype,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "nesterov": nesterov,
            "transposed": False,
            "stacked": False,
            "fused": fused,
        }
        self._tensors = GroupTensors(process_group)
        super().__init__(params, defaults)
        check_rules(self.param_groups, mars_type, optimize_1d)
        self._step_supports_amp_scaling = fused  # tells a GradScaler of grad_scale and found_inf
        # Not part of the state: it only serves a warning.
        self._lrs_differed = len({group["lr"] for group in self.param_groups}) > 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The memory of this process, which no state_dict, copy or pickle holds: they start without it.
        self.__dict__.setdefault("_tensors", GroupTensors())
        self.__dict__.setdefault("_step_supports_amp_scaling", self.defaults["fused"])

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, split by rule where it has no `rule` of its own.

        Args:
            param_group: `params` and any arguments of the constructor.

        Raises:
            TypeError: a set, whose order changes between runs, or something that is no tensor.
            ValueError: as the constructor, or a parameter that is in a group already. Nothing is added then.
        """
        known = {id(p) for group in self.param_groups for p in group["params"]}
        finished = list(finished_groups(param_group, self.defaults, known))
        for group in finished:
            for p in map(tensor_of, group["params"]):
                self._check_path(p, group)
        running = self._exact_groups()
        for split in finished:
            group = {**dict.fromkeys(_EXACT_PHASE, False), **split}
            ids_in_use = [existing["group_id"] for existing in self.param_groups]
            group["group_id"] = self._tensors.add(map(tensor_of, group["params"]), ids_in_use)
            super().add_param_group(group)
            for name in _IN_NO_GROUP:  # torch filled them in from the defaults
                del group[name]
            if running:
                group.update({name: running[0][name] for name in _EXACT_PHASE})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, bs: int | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss.
            bs: accepted and unused, as in the authors' template.

        Returns:
            What `closure` returned, or None.

        Raises:
            ValueError: a sparse gradient, a parameter flattened after routing, state of another shape, a hyperparameter
                out of range, or in exact mode a reference gradient that was not renewed since the step before. Nothing
                is modified then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Neither may go: a GradScaler multiplies by the first, and deletes both afterwards.
        grad_scale, found_inf = getattr(self, "grad_scale", 1.0), getattr(self, "found_inf", 0.0)
        self.grad_scale, self.found_inf = 1.0, 0.0
        if float(found_inf):
            return loss
        hypers = [Hyper.of(group) for group in self.param_groups]
        work = [(g, hyper, *same) for g, hyper in zip(self.param_groups, hypers) for same in self._layouts(g, hyper)]
        # DeepSpeed steps one group at a time, with only that one in param_groups.
        if self.__dict__.get("_lrs_differed") and len(self.param_groups) == len(self._tensors):
            warn_of_one_lr(self.param_groups)
        updates = [update for item in work if (update := self._update(*item, grad_scale)) is not None]
        if self.metrics is not None and self.metrics.measures:
            self.metrics.measure(updates)
        for update in clipped_updates(updates):
            apply_(update)
        if updates or not work:
            for group in self._exact_groups():
                group["last_grad_is_used"] = True
        return loss

    def _layouts(self, group: Group, hyper: Hyper) -> list[tuple[list[Tensor], Sharding]]:
        """The parameters of a group that have a gradient, by layout, checked; modifies nothing."""
        if group["last_grad_is_used"]:
            raise ValueError(
                "step() in exact mode has no reference gradient for this batch: call update_previous_grad() before "
                "and update_last_grad() after each step()"
            )
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        for p in params:
            if p.grad.layout != torch.strided:
                raise ValueError(f"{name_of(p, group)} has a sparse gradient: build its embedding with sparse=False")
        found = list(self._tensors.by_layout(group, params, partial(name_of, group=group)))
        for same, _ in found:
            self._check_path(same[0], group)
            for p in same:
                state = self.state.get(p, {})
                if not self._tensors.is_flat(p) and "exp_avg" not in state:
                    check_parameter(p, group)
                check_state(state, p, hyper, group)
        return found

    def _check_path(self, p: Tensor, group: Group) -> None:
        """Raises ValueError where `fused` cannot serve a parameter."""
        if self.defaults["fused"] and group["rule"] in MARS_RULES:
            check_served(p, group)

    def _update(
        self, group: Group, hyper: Hyper, params: list[Tensor], sharding: Sharding, grad_scale: Any
    ) -> Update | None:
        """The coming update of parameters that share a layout; creates their state and counts the step."""
        names = state_names(hyper)
        is_first = not any("exp_avg" in self.state.get(p, ()) for p in params)
        for p in params:
            prepare_state(self.state[p], p, hyper)
        grads = sharding.parts([gradient_like(p) for p in params])
        if is_first and is_dry_run(group, params, grads, sharding, self._tensors):
            return None  # and the step does not count
        states = [self.state[p] for p in params]
        if "step" in names:
            torch._foreach_add_([state["step"] for state in states], 1)
        state = {name: sharding.parts([state[name] for state in states]) for name in names}
        path = COMPILED if self.defaults["fused"] and hyper.rule in MARS_RULES else EAGER
        numbers = Numbers.of(hyper, grad_scale, params[0].device)
        return Update(Tensors.of(params=sharding.parts(params), grads=grads, **state), numbers, hyper, sharding, path)

    def state_dict(self) -> dict[str, Any]:
        """State and hyperparameters; dtypes by name, because sharded checkpoints of torch hold no dtype."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            for name in _DTYPES:
                group[name] = str(group[name]).removeprefix("torch.") if group[name] else None
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of the same rules; the hyperparameters become those that were saved.

        Args:
            state_dict: what `state_dict()` returned; not modified.

        Raises:
            ValueError: it was saved by another optimizer, or with other rules. Nothing is loaded then.
        """
        for name in ("rule", "is_approx"):
            saved = [group.get(name) for group in state_dict["param_groups"]]
            here = [group[name] for group in self.param_groups]
            if saved != here:
                raise ValueError(
                    f"state_dict: {name} of the saved param groups is {saved}, of this optimizer {here}: "
                    "build the optimizer with the parameters and arguments of the run that saved it"
                )
        ids = [group["group_id"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, group_id in zip(self.param_groups, ids):
            group["group_id"] = group_id  # of this process, and older checkpoints have none
            group.setdefault("stacked", False)  # nor this
            for name in _DTYPES:
                if isinstance(group[name], str):
                    group[name] = getattr(torch, group[name])
            for p in group["params"]:
                restore_state(self.state.get(p, {}), p, group["last_grad_dtype"])

    @torch.no_grad()
    def update_previous_grad(self) -> None:
        """Exact mode: keeps a copy of `p.grad`, the look-ahead gradient, as h of the step after the coming one.

        Elements that are not finite (an overflow) are kept as 0, which means no reference. Does nothing in approx mode.

        Raises:
            ValueError: called between `step()` and `update_last_grad()`, or where no parameter has a gradient.
        """
        if any(group["last_grad_is_used"] for group in self._exact_groups()):
            raise ValueError("update_previous_grad() came after step(): call update_last_grad() first")
        if self._exact_groups() and all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "update_previous_grad() found no gradient: call it between backward() and zero_grad(); "
                "is_approx=False is not served under DeepSpeed, which keeps gradients to itself"
            )
        for group in self._exact_groups():
            for p in group["params"]:
                copy_grad(self.state[p], "previous_grad", p, group["last_grad_dtype"])
            group["previous_grad_is_set"] = True

    @torch.no_grad()
    def update_last_grad(self) -> None:
        """Exact mode: makes the gradient of `update_previous_grad()` the h of the next step.

        Call it once after each `step()`, also when a GradScaler skipped it. Without an `update_previous_grad()` since
        the last call (the final iteration has no next batch) the next `step()` raises. Does nothing in approx mode.

        Raises:
            ValueError: neither `update_previous_grad()` nor `step()` was called since the last call.
        """
        if any(not g["last_grad_is_used"] and not g["previous_grad_is_set"] for g in self._exact_groups()):
            raise ValueError("update_last_grad() came first: call update_previous_grad() and step() before it")
        for group in self._exact_groups():
            if not group["previous_grad_is_set"]:
                continue
            for p in group["params"]:
                state = self.state.get(p, {})
                if "previous_grad" in state:
                    # The memory of the used h serves the next look-ahead.
                    used = state["last_grad"] if "last_grad" in state else torch.zeros_like(state["previous_grad"])
                    state["last_grad"], state["previous_grad"] = state["previous_grad"], used
                elif "last_grad" in state:
                    state["last_grad"].zero_()  # the look-ahead did not reach this parameter: no reference
            group["last_grad_is_used"] = group["previous_grad_is_set"] = False

    @torch.no_grad()
    def set_last_grad(self) -> None:
        """Exact mode: makes a copy of `p.grad`, taken at the previous parameters, the h of the coming step.

        Elements that are not finite (an overflow) become 0, which means no reference. Does nothing in approx mode.
        """
        for group in self._exact_groups():
            for p in group["params"]:
                copy_grad(self.state[p], "last_grad", p, group["last_grad_dtype"])
            group["last_grad_is_used"] = False

    def needs_reference(self) -> bool:
        """Whether any param group is in exact mode and keeps a reference gradient."""
        return bool(self._exact_groups())

    def _exact_groups(self) -> list[Group]:
        return [g for g in self.param_groups if not g["is_approx"] and "last_grad" in RULES[g["rule"]].state]
