"""The MARS optimizer."""

import warnings
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
from mars_hf.optim.param_groups import check_parameter, name_of, split_by_rule, tensor_of
from mars_hf.optim.rules import MARS_RULES, MATRIX_RULES, RULES, Numbers, Tensors, squared_norms, state_names
from mars_hf.optim.sharding import GroupTensors, Sharding, gradient_like, layouts, same_layout, whole_norms
from mars_hf.optim.update import EAGER, Update, apply_, clipped_updates

# Arguments that only say how plain parameters are split into groups; a finished group holds their outcome.
_ROUTING = ("mars_type", "lr_1d", "betas_1d", "weight_decay_1d")
# The one that says how fast, not what: a checkpoint must load with and without it, so only `defaults` hold it.
_SPEED = ("fused",)
_DTYPES = ("last_grad_dtype", "ns_dtype")
# Where exact mode stands between its three calls; kept in every param group, so that it survives the state_dict.
_EXACT_PHASE = ("last_grad_is_used", "previous_grad_is_set")

Group = dict[str, Any]


class MARS(torch.optim.Optimizer):
    r"""MARS: variance-reduced AdamW, Lion, Shampoo and Muon, and the baselines AdamW and Muon.

    With g the gradient (after any global clipping), h the reference gradient and alpha = gamma beta1 / (1 - beta1):

        c = g + alpha (g - h);   c = c / max(1, ||c||_2 / clip_c)   (norm of the whole tensor)
        m = beta1 m + (1 - beta1) c

    | mars_type | update of a matrix p (decay uses p before the step) |
    | --- | --- |
    | mars-adamw | v = beta2 v + (1 - beta2) c^2; AdamW with m and v: p -= lr (wd p + m_hat / (sqrt(v_hat) + eps)) |
    | mars-lion | p -= lr (wd p + sign(m)) |
    | mars-shampoo | p -= lr (wd p + max(1, rows / cols)^0.5 NS5(m / (1 - beta1))) |
    | mars-m | p -= lr (wd p + 0.2 sqrt(max(rows, cols)) NS5(m)) |
    | adamw | AdamW on g |
    | muon | b = beta1 b + g; p -= lr (wd p + max(1, rows / cols)^0.5 NS5(g + beta1 b)) |
    | moonlight | as muon with the factor 0.2 sqrt(max(rows, cols)) |

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
            update, faster. It serves float16 to float64 on CPU (with a C++ compiler, g++) and CUDA, and compiles for
            some seconds at the first step. It holds for all groups; adamw, muon and moonlight do not change. Not part
            of the state_dict.

    As torch's fused optimizers, `step()` divides every gradient by the attribute `grad_scale` (a number or a 0-dim
    tensor), where it is set, and does nothing where the attribute `found_inf` is not 0; it consumes both. So a global
    clip need not rewrite the gradients, which `p.grad` holds undivided afterwards:

        optimizer.grad_scale = torch.clamp((torch.nn.utils.get_total_norm(grads) + 1e-6) / max_norm, min=1.0)

    With fused=True a GradScaler hands over its scale in this way.

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
        if mars_type not in MARS_RULES:
            given = {"optimize_1d": optimize_1d, "memory_efficient": memory_efficient, "is_approx": is_approx}
            for name, value in given.items():
                if value != (name == "is_approx"):
                    raise ValueError(f"{name}={value!r} belongs to MARS, not to mars_type={mars_type!r}: leave it out")
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
        self.metrics = None
        super().__init__(params, defaults)
        rules = {group["rule"] for group in self.param_groups}
        wanted = MATRIX_RULES if mars_type in MATRIX_RULES and not optimize_1d else MARS_RULES | {mars_type}
        if not rules & wanted:
            raise ValueError(
                f"params: nothing is left for mars_type={mars_type!r}, the param groups have only {sorted(rules)}: "
                "with ready groups pass the mars_type they were built for, without matrices optimize_1d=True or 'adamw'"
            )
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
        given = dict(param_group)
        if isinstance(given["params"], set):
            raise TypeError("params is a set, whose order changes between runs: pass a list")
        given["params"] = [given["params"]] if isinstance(given["params"], Tensor) else list(given["params"])
        known = {id(p) for group in self.param_groups for p in group["params"]}
        for i, p in enumerate(map(tensor_of, given["params"])):
            if not isinstance(p, Tensor):
                raise TypeError(f"params[{i}] is a {type(p).__name__}: pass tensors")
            if id(p) in known:
                raise ValueError(f"{name_of(p, given)} is in another param group: give it one")
        if given.get("fused", self.defaults["fused"]) != self.defaults["fused"]:
            raise ValueError(
                f"fused={given['fused']!r} in a param group: pass it to MARS, where it holds for all groups"
            )
        finished = list(split_by_rule(given, self.defaults))
        for group in finished:
            hyper = Hyper.of(group)
            tensors = [tensor_of(p) for p in group["params"]]
            for p in tensors:
                check_parameter(p, group)
                self._check_path(p, hyper, group)
            list(layouts(tensors, tensors, None, {}, partial(name_of, group=group)))
        running = self._exact_groups()
        for split in finished:
            group = {**dict.fromkeys(_EXACT_PHASE, False), **split}
            ids_in_use = [existing["group_id"] for existing in self.param_groups]
            group["group_id"] = self._tensors.add(map(tensor_of, group["params"]), ids_in_use)
            super().add_param_group(group)
            for name in (*_ROUTING, *_SPEED):  # torch filled them in from the defaults
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
        # A GradScaler multiplies by the one and deletes both, so they may not go.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            self.grad_scale = 1.0
        if found_inf is not None:
            self.found_inf = 0.0
            if float(found_inf):
                return loss
        work = [
            (group, hyper, *same)
            for group, hyper in [(group, Hyper.of(group)) for group in self.param_groups]
            for same in self._layouts(group, hyper)
        ]
        self._warn_of_overwritten_lr()
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
        like_p = set(state_names(hyper)) - {"step"}
        for same, _ in found:
            self._check_path(same[0], hyper, group)
            for p in same:
                state = self.state.get(p, {})
                if not self._tensors.is_flat(p) and "exp_avg" not in state:
                    check_parameter(p, group)
                for name in like_p & state.keys():
                    if state[name].shape != p.shape:
                        raise ValueError(
                            f"{name_of(p, group)} has a state {name!r} of shape {tuple(state[name].shape)}: load the "
                            "state of the same model"
                        )
        return found

    def _check_path(self, p: Tensor, hyper: Hyper, group: Group) -> None:
        """Raises ValueError where `fused` cannot serve a parameter."""
        if self.defaults["fused"] and hyper.rule in MARS_RULES:
            check_served(p, name_of(p, group))

    def _update(
        self, group: Group, hyper: Hyper, params: list[Tensor], sharding: Sharding, grad_scale: Any
    ) -> Update | None:
        """The coming update of parameters that share a layout; creates their state and counts the step."""
        names = state_names(hyper)
        is_first = not any("exp_avg" in self.state.get(p, ()) for p in params)
        for p in params:
            self._init_state(p, names, hyper.last_grad_dtype)
        grads = sharding.parts([gradient_like(p) for p in params])
        if is_first and self._is_dry_run(group, params, grads, sharding):
            return None  # and the step does not count
        states = [self.state[p] for p in params]
        if "step" in names:
            torch._foreach_add_([state["step"] for state in states], 1)
        state = {name: sharding.parts([state[name] for state in states]) for name in names}
        path = COMPILED if self.defaults["fused"] and hyper.rule in MARS_RULES else EAGER
        numbers = Numbers.of(hyper, scale_of_gradients(grad_scale, params[0].device))
        return Update(Tensors.of(params=sharding.parts(params), grads=grads, **state), numbers, hyper, sharding, path)

    def _is_dry_run(self, group: Group, params: list[Tensor], grads: list[Tensor], sharding: Sharding) -> bool:
        """Whether the caller only wants to see the state: a first step with gradients all zero that cannot be real.

        torch.distributed.checkpoint steps once like this, with lr 0, and DeepSpeed's stage 0 in bfloat16 before
        training, with the real lr and whole tensors of its own in place of ours. The flat tensors of ZeRO are stepped
        in training alone, and one of them may well have no gradient but zeros at first, say the A matrices of LoRA.
        """
        if self._tensors.is_flat(params[0]):
            return False
        if group["lr"] != 0 and (not sharding.whole or self._tensors.holds_any(group, params)):
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
        shown = len(self.param_groups) == len(self._tensors)
        if self.__dict__.get("_lrs_differed") and shown and len(lrs) == 1 and lrs != {0.0}:
            warnings.warn(
                "every param group has the same lr, although they started with different ones (lr and lr_1d): a loop "
                "that writes one lr into every group should scale each group's own lr instead",
                stacklevel=5,
            )

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
        # torch casts every floating-point state to the dtype of its parameter, and leaves the step count where it is.
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                for name in ("last_grad", "previous_grad"):
                    if name in state:
                        state[name] = state[name].to(group["last_grad_dtype"] or p.dtype)
                if "step" in state:
                    state["step"] = state["step"].to(p.device)

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

    def _copy_grad(self, p: Tensor, group: Group, name: str) -> None:
        """Copies p.grad into the state, elements that are not finite as 0; without a gradient there is no reference."""
        if p.grad is None:
            if name in self.state.get(p, ()):
                self.state[p][name].zero_()
            return
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p, dtype=group["last_grad_dtype"])
        state[name].copy_(p.grad).nan_to_num_(0.0, 0.0, 0.0)

    def _exact_groups(self) -> list[Group]:
        return [g for g in self.param_groups if not g["is_approx"] and "last_grad" in RULES[g["rule"]].state]


def scale_of_gradients(grad_scale: Any, device: torch.device) -> Any:
    """1 / grad_scale: a number for tensors on the CPU, for others a tensor, which needs no host sync; None for 1."""
    if grad_scale is None or (isinstance(grad_scale, (int, float)) and grad_scale == 1):
        return None
    if device.type == "cpu" or not isinstance(grad_scale, Tensor):
        return 1 / float(grad_scale)
    return (1 / grad_scale).reshape(()).to(device)
