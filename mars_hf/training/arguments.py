"""The hyperparameters of MARS as typed arguments."""

import os
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

from mars_hf.optim.hyper import one_of
from mars_hf.optim.param_groups import SHARED_LR, adamw_hyperparameters
from mars_hf.optim.rules import RULES
from mars_hf.training.tracking import check_trackers, git_revision

# --optim NAME -> mars_type; None: mars_type decides, mars-adamw unless it is given.
OPTIM_NAMES: dict[str, str | None] = {
    "mars": None,
    "mars_adamw": "mars-adamw",
    "mars_lion": "mars-lion",
    "mars_shampoo": "mars-shampoo",
    "mars_m": "mars-m",
}


@dataclass
class MARSArguments:
    """Hyperparameters of `MARS`, under the names that the command line gives them; see `MARS` for what they do.

    `--optim_args "gamma=0.025,lr_1d=3e-3"` sets the same fields, with or without the prefix `mars_`. The matrices' lr,
    weight decay and eps are the Trainer's `learning_rate`, `weight_decay` and `adam_epsilon`.
    """

    mars_type: str | None = field(
        default=None,
        metadata={"help": f"Update rule with --optim mars: {', '.join(RULES)}. Default: mars-adamw."},
    )
    mars_beta1: float = field(default=0.95, metadata={"help": "Momentum coefficient of the matrices."})
    mars_beta2: float = field(default=0.99, metadata={"help": "Second-moment coefficient of the matrices."})
    mars_gamma: float = field(default=0.025, metadata={"help": "Strength of the variance reduction; 0 is none."})
    mars_clip_c: float = field(
        default=1.0,
        metadata={"help": "Threshold for the norm of each tensor's corrected gradient; 0 does not clip."},
    )
    is_approx: bool = field(
        default=True,
        metadata={
            "help": "The reference gradient is that of the step before. False (exact): that of the batch at the "
            "previous parameters, a second gradient in each step; MARSTrainer on one process, DDP and FSDP2."
        },
    )
    optimize_1d: bool = field(default=False, metadata={"help": "Vectors follow the MARS rule too, with learning_rate."})
    lr_1d: float | None = field(
        default=None,
        metadata={
            "help": "Peak learning rate of AdamW-ruled parameters (vectors; for mars-m and moonlight embeddings and "
            "head too). Default: learning_rate / 2, as in the paper; for mars-m, moonlight and adamw learning_rate."
        },
    )
    beta1_1d: float | None = field(
        default=None, metadata={"help": "beta1 of AdamW-ruled parameters. Default: 0.9; for adamw mars_beta1."}
    )
    beta2_1d: float | None = field(
        default=None, metadata={"help": "beta2 of AdamW-ruled parameters. Default: 0.95; for adamw mars_beta2."}
    )
    weight_decay_1d: float | None = field(
        default=None,
        metadata={"help": "Weight decay of AdamW-ruled parameters. Default: what mars_decay says."},
    )
    mars_decay: Literal["trainer", "authors"] = field(
        default="trainer",
        metadata={
            "help": "trainer: weight_decay for everything but biases and norms, as without MARS. authors: their GPT-2 "
            "runs, that is weight_decay for matrices, 0 for embeddings, weight_decay_1d (0.1) for vectors."
        },
    )
    mars_amsgrad: bool = field(default=False, metadata={"help": "Running maximum of the second moment."})
    mars_memory_efficient: bool = field(
        default=False,
        metadata={"help": "mars-lion, mars-shampoo, mars-m without a stored reference gradient; needs mars_clip_c 0."},
    )
    mars_last_grad_dtype: str | None = field(
        default=None, metadata={"help": "Dtype of the stored reference gradient, e.g. bfloat16."}
    )
    mars_ns_steps: int = field(default=5, metadata={"help": "Newton-Schulz steps."})
    mars_ns_dtype: str = field(default="bfloat16", metadata={"help": "Dtype of the Newton-Schulz products."})
    mars_nesterov: bool = field(default=True, metadata={"help": "Nesterov momentum of muon and moonlight."})
    mars_fused: bool = field(
        default=False,
        metadata={"help": "Compile the step (torch.compile) on CPU and CUDA; CPUs need a C++ compiler (g++)."},
    )
    mars_metrics: bool = field(
        default=False,
        metadata={"help": "Log what the variance reduction does to gradients of matrices, every logging_steps."},
    )

    def updated(self, optim_args: str | None) -> "MARSArguments":
        """A copy with the values of `--optim_args "key=value,key=value"`.

        Args:
            optim_args: fields of this class, with or without the prefix `mars_`; None or "" changes nothing.

        Raises:
            ValueError: an unknown key, with the nearest valid one, or a value that does not parse.
        """
        known = {f.name: f for f in fields(MARSArguments)}
        short = {name.removeprefix("mars_"): name for name in known if name != "mars_type"}
        values: dict[str, Any] = {}
        for item in filter(None, (optim_args or "").replace(" ", "").split(",")):
            key, equals, value = item.partition("=")
            one_of("optim_args key", key, [*short, *known], listed=", ".join(short))
            name = short.get(key, key)
            if not equals:
                raise ValueError(f"optim_args={optim_args!r}: {key!r} has no value, write {key}=VALUE")
            values[name] = _parse(name, value)
        return replace(self, **values)

    def rule(self, optim: str) -> str:
        """The rule that `--optim` and `mars_type` name together.

        Raises:
            ValueError: they contradict each other, or `mars_type` is unknown.
        """
        by_name = OPTIM_NAMES[optim]
        if self.mars_type is not None:
            one_of("mars_type", self.mars_type, RULES)
        if by_name is not None and self.mars_type not in (None, by_name):
            raise ValueError(f"mars_type={self.mars_type!r} contradicts optim={optim!r}: use optim='mars' or drop it")
        return by_name or self.mars_type or "mars-adamw"

    def constructor_arguments(self, rule: str, lr: float, weight_decay: float, eps: float) -> dict[str, Any]:
        """Keyword arguments of `MARS`.

        Args:
            rule: the `mars_type` of `MARS`.
            lr: peak learning rate, per optimizer step.
            weight_decay: decoupled weight decay of the matrices.
            eps: the optimizer's eps.

        Raises:
            ValueError: an unknown dtype, half a pair of betas, or muon without `lr_1d`.
        """
        lr_1d = self.lr_1d
        if lr_1d is None:
            if rule == "muon":
                raise ValueError("lr_1d=None: muon's lr suits matrices only, pass lr_1d, AdamW's lr for the rest")
            # Half of it is the ratio of all the paper's runs.
            lr_1d = lr if rule in SHARED_LR else lr / 2
        if (self.beta1_1d is None) != (self.beta2_1d is None):
            raise ValueError(f"beta1_1d={self.beta1_1d} and beta2_1d={self.beta2_1d}: give both or neither")
        return {
            "lr": lr,
            "betas": (self.mars_beta1, self.mars_beta2),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": self.mars_amsgrad,
            "gamma": self.mars_gamma,
            "is_approx": self.is_approx,
            "mars_type": rule,
            "optimize_1d": self.optimize_1d,
            "lr_1d": lr_1d,
            "betas_1d": None if self.beta1_1d is None else (self.beta1_1d, self.beta2_1d),
            "weight_decay_1d": self.weight_decay_1d,
            "clip_c": self.mars_clip_c or None,
            "memory_efficient": self.mars_memory_efficient,
            "last_grad_dtype": _dtype("mars_last_grad_dtype", self.mars_last_grad_dtype),
            "ns_steps": self.mars_ns_steps,
            "ns_dtype": _dtype("mars_ns_dtype", self.mars_ns_dtype),
            "nesterov": self.mars_nesterov,
            "fused": self.mars_fused,
        }


@dataclass
class MARSTrainingArguments(MARSArguments, TrainingArguments):
    """`TrainingArguments` that know `--optim mars` and its hyperparameters, for `MARSTrainer`.

    Args:
        optim: mars (mars_type decides, mars-adamw by default), mars_adamw, mars_lion, mars_shampoo, mars_m, or any
            optimizer of the Trainer.
        run_name: name of the run for trackers; None: that of the folder `output_dir`.

    Raises:
        ValueError: an unknown `optim`, arguments that contradict each other, or a tracker that is not installed.
    """

    optim: str = field(
        default="mars",
        metadata={"help": f"{', '.join(OPTIM_NAMES)}, or any optimizer of the Trainer (adamw_torch, ...)."},
    )
    # The Trainer takes several, but its type lets the command line give only one.
    report_to: list[str] = field(
        default_factory=lambda: ["none"],
        metadata={"help": "Trackers, such as tensorboard, wandb, trackio; all that are installed, or none."},
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            # Without it several processes on CPUs would each train alone, and DeepSpeed would not be started.
            self.use_cpu = True
        if not (self.bf16 or self.fp16):
            # A launch file's mixed_precision applies in any case; DeepSpeed is checked against the argument too.
            launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
            self.bf16, self.fp16 = launched == "bf16", launched == "fp16"
        name = optim_name(self)
        if name not in OPTIM_NAMES:
            if name in RULES:
                raise ValueError(f"optim={name!r} is unknown: use --optim mars --mars_type {name}")
            known = [*OPTIM_NAMES, *(member.value for member in OptimizerNames)]
            one_of("optim", name, known, listed=f"{', '.join(OPTIM_NAMES)}, or an optimizer of the Trainer")
            super().__post_init__()
        else:
            mars_arguments(self).rule(name)
            # TrainingArguments takes only the names of its own enum.
            self.optim = OptimizerNames.ADAMW_TORCH.value
            super().__post_init__()
            self.optim = name
        check_trackers(self.report_to)
        self.run_name = self.run_name or Path(str(self.output_dir)).resolve().name

    def to_dict(self) -> dict[str, Any]:
        """The arguments as trackers log them, with the hyperparameters of MARS, all defaults filled in, and the git
        revision of the running script."""
        return {**super().to_dict(), "mars": mars_hyperparameters(self), "git_revision": git_revision()}


def optim_name(args: TrainingArguments) -> str:
    """`--optim` as a string; stock arguments hold a member of an enum, which no dict of strings finds."""
    return str(getattr(args.optim, "value", args.optim))


def mars_arguments(args: TrainingArguments) -> MARSArguments:
    """The MARS hyperparameters in training arguments: their fields, if they have them, and `optim_args` on top."""
    own: Mapping[str, Any] = vars(args) if isinstance(args, MARSArguments) else {}
    given = {f.name: own[f.name] for f in fields(MARSArguments) if f.name in own}
    return MARSArguments(**given).updated(args.optim_args)


def mars_hyperparameters(args: TrainingArguments) -> dict[str, Any]:
    """What `MARS` is given, all defaults filled in, as numbers, strings and lists; empty for another optimizer.

    `weight_decay_1d` stays None where the Trainer's grouping decides.

    Raises:
        ValueError: as `MARSArguments.constructor_arguments`.
    """
    if optim_name(args) not in OPTIM_NAMES:
        return {}
    hyper = mars_arguments(args)
    rule = hyper.rule(optim_name(args))
    arguments = hyper.constructor_arguments(rule, args.learning_rate, args.weight_decay, args.adam_epsilon)
    names = ("lr", "betas", "weight_decay", "lr_1d", "betas_1d", "weight_decay_1d")
    vectors = adamw_hyperparameters(rule, **{name: arguments[name] for name in names})
    arguments["betas_1d"] = vectors["betas"]
    if hyper.mars_decay == "authors":
        arguments["weight_decay_1d"] = vectors["weight_decay"]
    arguments["mars_decay"] = hyper.mars_decay
    return {name: _plain(value) for name, value in arguments.items()}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def _parse(name: str, value: str) -> Any:
    """A value of `optim_args` by the type of its field, as the command line would parse it."""
    optional = {f.name for f in fields(MARSArguments) if f.default is None} | {"mars_clip_c"}
    if value.lower() in ("none", "null") and name in optional:
        return None
    try:
        parsed = HfArgumentParser(MARSArguments, exit_on_error=False).parse_args([f"--{name}", value])  # type: ignore[arg-type]
    except ArgumentError:
        raise ValueError(f"optim_args: {name.removeprefix('mars_')}={value!r} cannot be read as its type") from None
    return getattr(parsed, name)


def _dtype(name: str, value: str | None) -> torch.dtype | None:
    if value is None:
        return None
    one_of(name, value, ("float64", "float32", "bfloat16", "float16"))
    return getattr(torch, value)
