"""The state of the authors' optimizers (github.com/AGI-Arena/MARS: MARS, MARS_M) as that of ours.

Their training scripts save `optimizer.state_dict()` in the checkpoint, where parameters are numbers, and all settings
in `config`. Their loops add up the losses of the micro-batches of a step where the Trainer averages: with k of them,
the same training has gradients, both clipping thresholds and eps smaller by k.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Names of the state in MARS_M: that of matrices, and that of what AdamW updates.
_MARS_M = {"exp_avg": ("momentum_buffer", "moment1"), "exp_avg_sq": ("moment2",)}


def why_not_convertible(saved: Any) -> str | None:
    """Why the optimizer of a checkpoint cannot be converted, or None.

    Args:
        saved: what the checkpoint holds as its optimizer.
    """
    if saved is None:
        return "the checkpoint holds no optimizer"
    if not isinstance(saved, dict):
        return "it was written by several optimizers (Muon with AdamW)"
    if not saved.get("param_groups"):
        return "its optimizer has no param groups"
    group = saved["param_groups"][0]
    if group.get("optimize_1d"):
        return "optimize_1d=True: its vectors are not decayed, ours are"
    if "mars_type" not in group and "mars_factor" not in group:
        return "it was written by another optimizer than MARS (AdamW, say)"
    return None


def settings_of(checkpoint: Mapping[str, Any], micro_batches: int | None = None) -> dict[str, Any]:
    """The settings of `MARSTrainingArguments` that go on with the training of a checkpoint.

    Args:
        checkpoint: as `train_mars.py` or `train_mars_m.py` save it, with an optimizer that is convertible.
        micro_batches: how many losses were added up for each step; None: the `gradient_accumulation_steps` of its
            config, which is right for runs of several processes.

    Returns:
        Names and values; `micro_batches` is in them as `gradient_accumulation_steps`.

    Raises:
        ValueError: the config lacks a setting, or has a schedule that the Trainer does not know.
    """
    config = dict(checkpoint.get("config") or {})
    group = checkpoint["optimizer"]["param_groups"][0]
    is_m = "mars_factor" in group
    needed = ["learning_rate", "max_iters", "warmup_iters", "lr_decay_iters", "min_lr", "grad_clip"]
    needed += ["gradient_accumulation_steps", "batch_size", "is_approx"] + ["lr_1d"] * (not is_m)
    missing = [name for name in needed if name not in config]
    if missing:
        raise ValueError(f"checkpoint: its config has no {', '.join(missing)}: pass --weights_only true")
    k = micro_batches or config["gradient_accumulation_steps"]
    mars_type = "mars-m" if is_m else group["mars_type"]
    weight_decay = max(g["wd" if is_m else "weight_decay"] for g in checkpoint["optimizer"]["param_groups"])
    beta1, beta2 = (group["momentum"], 0.99) if is_m else group["betas"]
    beta1_1d, beta2_1d = group["adamw_betas"] if is_m else (0.9, 0.95)
    return {
        "optim": mars_type.replace("-", "_"),
        "learning_rate": config["learning_rate"],
        "weight_decay": weight_decay,
        **({"mars_ns_steps": group["ns_steps"]} if is_m else {"lr_1d": config["lr_1d"]}),
        **({} if is_m else {"weight_decay_1d": group["weight_decay_1d"], "mars_amsgrad": group["amsgrad"]}),
        "mars_beta1": beta1,
        "mars_beta2": beta2,
        "beta1_1d": beta1_1d,
        "beta2_1d": beta2_1d,
        "mars_gamma": group["gamma"],
        "is_approx": config["is_approx"],
        "adam_epsilon": group["adamw_eps" if is_m else "eps"] / k,
        "mars_clip_c": 1.0 / k,
        "max_grad_norm": config["grad_clip"] / k,
        "per_device_train_batch_size": config["batch_size"],
        "gradient_accumulation_steps": k,
        **_schedule(config),
    }


def _schedule(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("decay_lr", True):
        return {"max_steps": config["max_iters"], "lr_scheduler_type": "constant"}
    if config.get("schedule", "cosine") != "cosine":
        raise ValueError(f"checkpoint: schedule={config['schedule']!r} is not the Trainer's: pass --weights_only true")
    return {
        "max_steps": config["lr_decay_iters"],
        "warmup_steps": config["warmup_iters"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": config["min_lr"] / config["learning_rate"]},
    }


def parameter_names(saved: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[int, str]:
    """The names of the parameters that are numbers in a saved optimizer.

    Three groupings are known: MARS (linear weights, then everything else, each sorted by name), nanoGPT (matrices, then
    vectors, in the order of the model) and MARS_M (one group: linear weights, then everything else, in that order).

    Args:
        saved: the optimizer's state_dict.
        weights: the parameters as they are stored, in the order of the model.

    Raises:
        ValueError: the groups are of none of the three, or a parameter has no state.
    """
    linear = [
        n for n, w in weights.items() if w.ndim >= 2 and not n.endswith(("wte.weight", "wpe.weight", "head.weight"))
    ]
    matrices = [name for name, weight in weights.items() if weight.ndim >= 2]
    rest, vectors = ([n for n in weights if n not in names] for names in (linear, matrices))
    numbers = [group["params"] for group in saved["param_groups"]]
    for grouping in ([sorted(linear), sorted(rest)], [matrices, vectors], [linear + rest]):
        if [len(names) for names in grouping] != [len(group) for group in numbers]:
            continue
        found = {i: name for group, names in zip(numbers, grouping) for i, name in zip(group, names)}
        shapes = {i: t.shape for i, state in saved["state"].items() for t in state.values() if getattr(t, "ndim", 0)}
        if all(shape == weights[found[i]].shape for i, shape in shapes.items()):
            bare = [name for i, name in found.items() if not saved["state"].get(i)]
            if bare:
                raise ValueError(
                    f"checkpoint: its optimizer has no state of {len(bare)} parameters ({bare[0]}, ...), as if it had "
                    "never stepped: pass --weights_only true"
                )
            return found
    raise ValueError(
        f"checkpoint: its optimizer has groups of {', '.join(str(len(group)) for group in numbers)} parameters, which "
        "are not grouped as MARS, nanoGPT or MARS_M do: pass --weights_only true"
    )


def decays_embeddings(saved: Mapping[str, Any], names: Mapping[int, str]) -> bool:
    """Whether the token embeddings stand in a group with weight decay, as nanoGPT's grouping has it."""
    (group,) = (g for g in saved["param_groups"] if any(names[i].endswith("wte.weight") for i in g["params"]))
    return bool(group.get("weight_decay"))


def converted(state: Mapping[str, Any], wanted: tuple[str, ...], micro_batches: int) -> dict[str, Tensor]:
    """The state of one parameter, under our names and in the scale of averaged losses.

    Args:
        state: as the authors' optimizer saved it.
        wanted: names, of `state_names`, but for `step`.
        micro_batches: how many losses were added up for each step.

    Raises:
        ValueError: something is not there; MARS_M_Efficient keeps no `last_grad`.
    """
    result = {}
    for name in wanted:
        aliases = (name, *_MARS_M.get(name, ()))
        found = next((state[alias] for alias in aliases if alias in state), None)
        if found is None:
            raise ValueError(f"checkpoint: its optimizer keeps no {name}: pass --weights_only true")
        result[name] = found / micro_batches ** (2 if name.endswith("sq") else 1)
    return result
