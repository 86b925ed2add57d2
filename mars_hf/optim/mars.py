"""The MARS optimizer."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mars_hf.optim.fused import check_fused
from mars_hf.optim.metrics import VarianceReduction
from mars_hf.optim.param_groups import split_by_rule
from mars_hf.optim.reference import EXACT_PHASE
from mars_hf.optim.rules import MARS_RULES, MATRIX_RULES, RULES
from mars_hf.optim.sharding import GroupTensors, layouts
from mars_hf.optim.step import Step
from mars_hf.optim.tensors import check_parameter, name_in, name_of, tensor_of
from mars_hf.optim.validation import check_hyperparameters, one_of

# Arguments that only say how plain parameters are split into groups; a finished group holds their outcome.
_ROUTING = ("mars_type", "lr_1d", "betas_1d", "weight_decay_1d")
# The one that says how fast, not what: a checkpoint must load with and without it, so only `defaults` hold it.
_SPEED = ("fused",)
_DTYPES = ("last_grad_dtype", "ns_dtype")


class MARS(Step):
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
    called once per step). `step()` modifies the parameters and the state in place and leaves `p.grad` alone.

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
        fused: True updates parameters on the CPU by the MARS rules in one compiled pass, which a C++ compiler with
            OpenMP (g++) builds when the optimizer is constructed: the same update, faster. It serves float32 and
            float64, amsgrad=False, and h in the dtype of the parameter or bfloat16. It holds for all groups; adamw runs
            torch's fused kernel with and without it, muon and moonlight do not change. Not part of the state_dict.

    Raises:
        ValueError: a value out of range, a combination that no rule serves, a sparse or complex gradient, a parameter
            that was flattened or sharded after routing, no parameter at all for the rule of `mars_type`, a
            `process_group` without this rank, or fused=True where it cannot be served.

    Source: MARS, arXiv 2411.10438 (algorithms 1 to 4); MARS-M, arXiv 2510.21800; where these and the authors' code
    disagree, the code.
    """

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
        fused: bool | None = None,
    ) -> None:
        one_of("mars_type", mars_type, RULES)
        if fused is not None and not isinstance(fused, bool):
            raise ValueError(f"fused={fused!r} must be True, False or None")
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
        # The memory of this process, which no state_dict, copy or pickle holds: they start without it.
        self._tensors = GroupTensors(process_group)
        self.metrics: VarianceReduction | None = None
        super().__init__(params, defaults)
        rules = {group["rule"] for group in self.param_groups}
        wanted = MATRIX_RULES if mars_type in MATRIX_RULES and not optimize_1d else MARS_RULES | {mars_type}
        if not rules & wanted:
            raise ValueError(
                f"params: nothing is left for mars_type={mars_type!r}, the param groups have only {sorted(rules)}: "
                "with ready groups pass the mars_type they were built for, without matrices optimize_1d=True or 'adamw'"
            )
        # Not part of the state: it only serves a warning.
        self._lrs_differed = len({group["lr"] for group in self.param_groups}) > 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
        for i, p in enumerate(given["params"]):
            if not isinstance(tensor_of(p), Tensor):
                raise TypeError(f"params[{i}] is a {type(tensor_of(p)).__name__}: pass tensors")
            if id(tensor_of(p)) in known:
                raise ValueError(f"{name_of(tensor_of(p), given, i)} is in another param group: give it one")
        if given.get("fused", self.defaults["fused"]) != self.defaults["fused"]:
            raise ValueError(
                f"fused={given['fused']!r} in a param group: pass it to MARS, where it holds for all groups"
            )
        finished = list(split_by_rule(given, self.defaults))
        for group in finished:
            check_hyperparameters(group)
            for i, p in enumerate(group["params"]):
                check_parameter(tensor_of(p), group, i)
            tensors = [tensor_of(p) for p in group["params"]]
            list(layouts(tensors, tensors, None, {}, partial(name_in, group)))
            if self.defaults["fused"]:
                check_fused(group)
        running = self._exact_groups()
        for split in finished:
            group = {**dict.fromkeys(EXACT_PHASE, False), **split}
            ids_in_use = [existing["group_id"] for existing in self.param_groups]
            group["group_id"] = self._memory().add(map(tensor_of, group["params"]), ids_in_use)
            super().add_param_group(group)
            for name in (*_ROUTING, *_SPEED):  # torch filled them in from the defaults
                del group[name]
            if running:
                group.update({name: running[0][name] for name in EXACT_PHASE})

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
        self.__dict__.pop("_bounds", None)
        # torch casts every floating-point state to the dtype of its parameter, and leaves the step count where it is.
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                for name in ("last_grad", "previous_grad"):
                    if name in state:
                        state[name] = state[name].to(group["last_grad_dtype"] or p.dtype)
                if "step" in state:
                    state["step"] = state["step"].to(p.device)
