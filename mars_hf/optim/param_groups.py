"""From parameters to param groups: which parameter gets which rule, learning rate and weight decay."""

import warnings
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from mars_hf.optim.hyper import Hyper, non_negative, one_of, two_betas
from mars_hf.optim.roles import embeddings, roles
from mars_hf.optim.rules import MARS_RULES, MATRIX_RULES, RULES
from mars_hf.optim.sharding import is_dense, layouts, whole_shape

# Of the types below the AdamW-ruled parameters share lr and weight decay with the matrices, as in the authors' runs.
SHARED_LR = frozenset({"mars-m", "moonlight", "adamw"})


def tensor_of(p: Any) -> Tensor:
    """The tensor of a parameter or of a (name, parameter) pair."""
    return p[1] if isinstance(p, tuple) else p


def name_of(p: Tensor, group: dict[str, Any]) -> str:
    """How to call a parameter of a group in an error."""
    i = next(i for i, given in enumerate(group["params"]) if tensor_of(given) is p)
    given = group["params"][i]
    name = given[0] if isinstance(given, tuple) else group.get("param_names", {i: i})[i]
    return f"parameter {name!r} (shape {whole_shape(p)})"


def check_parameter(p: Tensor, group: dict[str, Any]) -> None:
    """Raises ValueError for a parameter that the rule of its group cannot update."""
    if p.is_complex():
        raise ValueError(f"{name_of(p, group)} is complex: pass torch.view_as_real of it instead")
    if not is_dense(p):
        raise ValueError(f"{name_of(p, group)} has gaps in memory (strides {p.stride()}): pass a contiguous tensor")
    if getattr(p, "_fsdp_flattened", False) and group["rule"] != "adamw":
        raise ValueError(
            f"{name_of(p, group)} was flattened by FSDP1, where the rule {group['rule']!r} finds no whole tensor: "
            "train with DDP, FSDP2 or DeepSpeed ZeRO"
        )
    vectors_allowed = group["rule"] == "adamw" or (group["optimize_1d"] and group["rule"] not in MATRIX_RULES)
    if len(whole_shape(p)) < 2 and not vectors_allowed:
        raise ValueError(
            f"{name_of(p, group)} is no matrix, but its rule is {group['rule']!r}: give vectors the rule "
            "'adamw'; if an engine flattened it (FSDP1), train with DDP, FSDP2 or DeepSpeed ZeRO"
        )
    if group["rule"] in MATRIX_RULES and group["stacked"] and len(whole_shape(p)) != 3:
        raise ValueError(
            f"{name_of(p, group)} is no stack of matrices, which has three dimensions: give it a group with "
            "stacked=False"
        )


def vector_rule(mars_type: str, optimize_1d: bool) -> str:
    """The rule of parameters with ndim < 2."""
    if not optimize_1d:
        return "adamw"
    return "mars-adamw" if mars_type in MATRIX_RULES else mars_type


def adamw_hyperparameters(
    mars_type: str,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    lr_1d: float | None,
    betas_1d: tuple[float, float] | None,
    weight_decay_1d: float | None,
) -> dict[str, Any]:
    """lr, betas and weight_decay of AdamW-ruled parameters; None takes the default of `mars_type`."""
    shared = mars_type in SHARED_LR
    default_lr, default_decay = (lr, weight_decay) if shared else (3e-3, 0.1)
    default_betas = betas if mars_type == "adamw" else (0.9, 0.95)
    return {
        "lr": default_lr if lr_1d is None else lr_1d,
        "betas": default_betas if betas_1d is None else betas_1d,
        "weight_decay": default_decay if weight_decay_1d is None else weight_decay_1d,
    }


def split_by_rule(given: dict[str, Any], defaults: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits a param group by ndim, unless it has a `rule` of its own.

    Args:
        given: `params`, a list of tensors or (name, tensor) pairs, and any arguments of `MARS`.
        defaults: all arguments of `MARS`.

    Yields:
        Groups with one rule and every hyperparameter.

    Raises:
        ValueError: an unknown name, or a learning rate, weight decay or beta out of range.
    """
    values = {**defaults, **given}
    names = ("lr", "betas", "weight_decay", "lr_1d", "betas_1d", "weight_decay_1d")
    one_of("mars_type", values["mars_type"], RULES)
    for name in ("lr", "weight_decay", "lr_1d", "weight_decay_1d"):
        if values[name] is not None:
            non_negative(name, values[name])
    if values["betas_1d"] is not None:
        two_betas("betas_1d", values["betas_1d"])
    adamw = adamw_hyperparameters(values["mars_type"], **{name: values[name] for name in names})
    if "lr" in given and "lr_1d" not in given and values["mars_type"] not in SHARED_LR and defaults["lr"] > 0:
        # A group with another lr keeps the ratio of the two, as in the authors' code.
        adamw["lr"] *= given["lr"] / defaults["lr"]
    if "rule" in given:
        one_of("rule", given["rule"], RULES)
        any_vector = any(len(whole_shape(tensor_of(p))) < 2 for p in given["params"])
        inherited = adamw if given["rule"] == "adamw" else {}
        yield {**defaults, "optimize_1d": any_vector, **inherited, **given}
        return
    matrices: list[Any] = []
    vectors: list[Any] = []
    for p in given["params"]:
        (matrices if len(whole_shape(tensor_of(p))) >= 2 else vectors).append(p)
    mars_type = values["mars_type"]
    if matrices and RULES[mars_type].embeddings_to_adamw:
        warnings.warn(
            f"mars_type={mars_type!r} orthogonalises every matrix it is given, embeddings and output head too: "
            "build the groups with mars_param_groups(model) to leave those to AdamW",
            stacklevel=5,
        )
    if matrices or not vectors:
        yield {**values, "rule": mars_type, "params": matrices}
    if vectors:
        own = {} if values["optimize_1d"] else adamw
        rule = vector_rule(mars_type, values["optimize_1d"])
        yield {**values, **own, "rule": rule, "params": vectors}


def finished_groups(
    param_group: dict[str, Any], defaults: dict[str, Any], known: Collection[int]
) -> Iterator[dict[str, Any]]:
    """Splits a param group as `split_by_rule` does and checks what comes out.

    Args:
        param_group: `params` and any arguments of `MARS`; not modified.
        defaults: all arguments of `MARS`.
        known: the ids of the parameters that are in a group already.

    Raises:
        TypeError: a set, whose order changes between runs, or something that is no tensor.
        ValueError: a parameter or hyperparameter that `MARS` does not take.
    """
    check_baseline(defaults)
    given = dict(param_group)
    if isinstance(given["params"], set):
        raise TypeError("params is a set, whose order changes between runs: pass a list")
    given["params"] = [given["params"]] if isinstance(given["params"], Tensor) else list(given["params"])
    for i, p in enumerate(map(tensor_of, given["params"])):
        if not isinstance(p, Tensor):
            raise TypeError(f"params[{i}] is a {type(p).__name__}: pass tensors")
        if id(p) in known:
            raise ValueError(f"{name_of(p, given)} is in another param group: give it one")
    if given.get("fused", defaults["fused"]) != defaults["fused"]:
        raise ValueError(f"fused={given['fused']!r} in a param group: pass it to MARS, where it holds for all groups")
    for group in split_by_rule(given, defaults):
        Hyper.of(group)
        tensors = [tensor_of(p) for p in group["params"]]
        for p in tensors:
            check_parameter(p, group)
        list(layouts(tensors, tensors, None, {}, partial(name_of, group=group)))
        yield group


def check_baseline(arguments: dict[str, Any]) -> None:
    """Raises ValueError where a rule that is not of MARS is given an option of MARS."""
    for name, default in {"optimize_1d": False, "memory_efficient": False, "is_approx": True}.items():
        if arguments["mars_type"] not in MARS_RULES and arguments[name] != default:
            raise ValueError(
                f"{name}={arguments[name]!r} belongs to MARS, not to mars_type={arguments['mars_type']!r}: leave it out"
            )


def check_rules(groups: list[dict[str, Any]], mars_type: str, optimize_1d: bool) -> None:
    """Raises ValueError where nothing is left for the rule that was asked for."""
    rules = {group["rule"] for group in groups}
    wanted = MATRIX_RULES if mars_type in MATRIX_RULES and not optimize_1d else MARS_RULES | {mars_type}
    if not rules & wanted:
        raise ValueError(
            f"params: nothing is left for mars_type={mars_type!r}, the param groups have only {sorted(rules)}: "
            "with ready groups pass the mars_type they were built for, without matrices optimize_1d=True or 'adamw'"
        )


def warn_of_one_lr(groups: list[dict[str, Any]]) -> None:
    """Warns where groups that started with different learning rates have the same one."""
    lrs = {group["lr"] for group in groups}
    if len(lrs) == 1 and lrs != {0.0}:
        warnings.warn(
            "every param group has the same lr, although they started with different ones (lr and lr_1d): a loop "
            "that writes one lr into every group should scale each group's own lr instead",
            stacklevel=5,
        )


def mars_param_groups(
    model: nn.Module,
    *,
    lr: float,
    mars_type: str = "mars-adamw",
    betas: tuple[float, float] = (0.95, 0.99),
    weight_decay: float = 0.0,
    optimize_1d: bool = False,
    lr_1d: float | None = None,
    betas_1d: tuple[float, float] | None = None,
    weight_decay_1d: float | None = None,
    decay_names: Collection[str] | None = None,
    head: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Param groups for `MARS`, routed by the module that owns each parameter.

    The matrix rule (`mars_type`) goes to every matrix; for "mars-m", "muon" and "moonlight" embeddings and the output
    head, tied or not, go to AdamW with the vectors. `roles` says what counts as which: convolutions, experts, the gains
    of norms, raw parameters. Experts are orthogonalised one by one; the clip of c takes the norm of all of them, which
    are one tensor. Frozen parameters are left out.

    Weight decay without `decay_names` follows the authors' GPT-2 runs: `weight_decay` for matrices, 0 for embeddings,
    `weight_decay_1d` for vectors (for mars-m, muon and moonlight everything AdamW-ruled takes `weight_decay_1d`; for
    adamw it defaults to 0 here). With `decay_names` the parameters named there decay by `weight_decay`, others do not.

    Args:
        model: the model to train; only read.
        lr: peak learning rate of the matrix rule, per optimizer step.
        mars_type: a rule name, see `MARS`.
        betas: momentum coefficients of the matrix rule.
        weight_decay: decoupled weight decay, multiplied by lr at each step.
        optimize_1d: gives parameters with ndim < 2 the MARS rule with `lr` and `betas`.
        lr_1d: peak learning rate of AdamW-ruled parameters; None: as in `MARS`.
        betas_1d: their betas; None: as in `MARS`.
        weight_decay_1d: weight decay of AdamW-ruled parameters; None: as in `MARS`, or by `decay_names`.
        decay_names: names, as of `model.named_parameters()`, of the parameters to decay (the Trainer's grouping is
            `trainer.get_decay_parameter_names(model)`); None: the authors' grouping.
        head: the output head of a model that is not of transformers.

    Returns:
        Groups with `rule`, `params`, `lr`, `betas`, `weight_decay`, `optimize_1d`, `transposed` and `stacked`, the
        matrix rule first.

    Raises:
        ValueError: an unknown `mars_type`, a complex parameter, or an embedding with sparse gradients.

    Source: MARS (arXiv 2411.10438), MARS-M (arXiv 2510.21800) and the authors' training scripts.
    """
    one_of("mars_type", mars_type, RULES)
    for name, module in embeddings(model):
        if module.sparse:
            raise ValueError(
                f"model: embedding {name!r} has sparse=True, which MARS cannot update: build it with sparse=False"
            )
    to_adamw = ("embedding", "head") if RULES[mars_type].embeddings_to_adamw else ()
    by_id = roles(model, head)
    vectors = adamw_hyperparameters(
        mars_type,
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        lr_1d=lr_1d,
        betas_1d=betas_1d,
        weight_decay_1d=0.0 if mars_type == "adamw" and weight_decay_1d is None else weight_decay_1d,
    )
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.is_complex():
            raise ValueError(f"model: parameter {name!r} is complex, which MARS cannot update: train its real view")
        role = by_id[id(p)]
        is_vector = role.kind == "vector"
        rule = vector_rule(mars_type, optimize_1d) if is_vector else "adamw" if role.kind in to_adamw else mars_type
        adamw_ruled = (is_vector and not optimize_1d) or role.kind in to_adamw
        group = {
            "rule": rule,
            "optimize_1d": optimize_1d,
            "transposed": rule in MATRIX_RULES and role.transposed,
            "stacked": rule in MATRIX_RULES and role.stacked,
            **(vectors if adamw_ruled else {"lr": lr, "betas": betas, "weight_decay": weight_decay}),
        }
        if decay_names is not None:
            if not (adamw_ruled and weight_decay_1d is not None):
                group["weight_decay"] = weight_decay if name in decay_names else 0.0
        elif role.kind == "embedding" and not adamw_ruled:
            group["weight_decay"] = 0.0
        key = tuple(group.values())
        groups.setdefault(key, {**group, "params": []})["params"].append(p)
    return sorted(groups.values(), key=lambda g: (g["rule"] != mars_type, -g["weight_decay"]))
