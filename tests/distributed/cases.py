"""What is trained under every engine: the rules, and the circumstances in which they must still hold."""

import os
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

from engines import ENGINES, MEASURED_ENGINES

# Both clips bite at some steps and tensors and not at others; `test_clips_bite` makes sure of it.
MAX_GRAD_NORM, CLIP_C = 0.6, 0.1

# Largest difference of an element of the parameters, whose updates add up to about 1e-2. Newton-Schulz multiplies the
# smallest singular values, which are nothing but rounding, by up to 3.4445^5 = 485.
ELEMENTWISE, NEWTON_SCHULZ = 1e-6, 2e-5

_MARS = {"lr_1d": 1e-3, "mars_clip_c": CLIP_C, "mars_ns_dtype": "float32"}
RULES = {
    "mars-adamw": {"optim": "mars", **_MARS},
    "mars-adamw-1d": {"optim": "mars", **_MARS, "optimize_1d": True},
    "mars-lion": {"optim": "mars_lion", **_MARS},
    "mars-shampoo": {"optim": "mars_shampoo", **_MARS},
    "mars-m": {"optim": "mars_m", **_MARS},
    "mars-m-efficient": {"optim": "mars_m", **_MARS, "mars_memory_efficient": True, "mars_clip_c": 0.0},
    "adamw": {"optim": "mars", "mars_type": "adamw", **_MARS},
    "moonlight": {"optim": "mars", "mars_type": "moonlight", **_MARS},
    # Knows nothing of this package: where it fails, the harness does.
    "adamw_torch": {"optim": "adamw_torch"},
}
ORTHOGONAL = ("mars-shampoo", "mars-m", "mars-m-efficient", "moonlight")


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        rule: a key of RULES.
        arguments: more fields of MARSTrainingArguments.
        model: arguments of `worker.build_model`.
        events: fields of `worker.Events`.
        reference: the case that one process trains for comparison; "" for this one.
        measured: what a rank holds in memory is measured.
    """

    rule: str
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    reference: str = ""
    measured: bool = False

    @property
    def tolerance(self) -> float:
        return NEWTON_SCHULZ if self.rule in ORTHOGONAL else ELEMENTWISE

    def job(self, name: str, engine: str) -> dict[str, Any]:
        """What the worker reads."""
        arguments = {"max_grad_norm": MAX_GRAD_NORM, **RULES[self.rule], **self.arguments}
        facts = {"model": self.model, "events": self.events, "measured": self.measured}
        return {"name": name, "engine": engine, "arguments": arguments, **facts}


def _several(rules: tuple[str, ...], suffix: str, **fields: Any) -> dict[str, Case]:
    return {f"{rule}-{suffix}": Case(rule, **fields) for rule in rules}


CASES: dict[str, Case] = {
    **{rule: Case(rule) for rule in RULES},
    **{
        f"{rule}-accumulated": Case(rule, {"gradient_accumulation_steps": 4}, reference=rule)
        for rule in ("mars-adamw", "mars-m", "adamw_torch")
    },
    "mars-adamw-bias": Case("mars-adamw", {"mars_decay": "authors"}, {"bias": True}),
    "mars-adamw-1d-bias": Case("mars-adamw-1d", model={"bias": True}),
    "mars-shampoo-frozen": Case("mars-shampoo", model={"frozen": ["transformer.wpe.weight"]}),
    "mars-m-frozen": Case("mars-m", model={"frozen": ["transformer.h.0.attn.c_attn.weight"]}),
    **{
        f"{rule}-zero-init": Case(rule, model={"zero_init": True}, reference=rule)
        for rule in ("mars-adamw", "mars-shampoo", "mars-m", "adamw_torch")
    },
    **_several(("mars-adamw", "mars-m"), "exact", arguments={"is_approx": False, "gradient_accumulation_steps": 2}),
    **{f"{rule}-fused": Case(rule, {"mars_fused": True}, reference=rule) for rule in ("mars-adamw", "mars-m")},
    "mars-adamw-scored": Case("mars-adamw", events={"scored": 4}, reference="mars-adamw"),
    "mars-m-exact-scored": Case(
        "mars-m",
        {"is_approx": False, "gradient_accumulation_steps": 2},
        events={"scored": 4},
        reference="mars-m-exact",
    ),
    # The last block takes its first step, of the size of lr wherever |g| > eps, when lr is no longer 0: a larger eps
    # keeps the rounding of the smallest g out of it.
    **_several(
        ("mars-adamw", "mars-m", "adamw_torch"),
        "bypassed",
        arguments={"adam_epsilon": 1e-5},
        events={"bypassed": [0, 1, 5]},
    ),
}
FLOAT32 = tuple(CASES)

LOW_PRECISION = {
    **_several(("mars-adamw", "mars-shampoo", "mars-m", "adamw_torch"), "bf16", arguments={"bf16": True}),
    **_several(("mars-adamw", "mars-m", "adamw_torch"), "fp16", arguments={"fp16": True}),
}

# Engines that differ from another one in an option alone train these, and under ZeRO-3 every rule.
VARIANTS = ("ddp-bucket-view", "zero2-offload", "zero3-offload", "zero2-round-robin")
_PATHS = [
    f"{rule}{circumstance}"
    for rule in ("mars-adamw", "mars-m", "adamw_torch")
    for circumstance in ("", "-accumulated", "-bf16")
]
VARIED = (*_PATHS, "mars-m-frozen")

SCORED = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "ddp-3")

# An overflow at step 4, and the training that never sees that batch: with a constant lr the two must agree.
OVERFLOWS = ("mars-adamw-bf16", "mars-m-fp16", "adamw_torch-fp16")
for _name in OVERFLOWS:
    _case = LOW_PRECISION[_name]
    _arguments = {**_case.arguments, "lr_scheduler_type": "constant", "warmup_steps": 0}
    CASES[f"{_name}-overflow"] = replace(_case, arguments=_arguments, events={"infinite_loss": 4})
    CASES[f"{_name}-lost"] = replace(_case, arguments={**_arguments, "max_steps": 9}, events={"lost_batch": 4})
CASES |= LOW_PRECISION

# Two million parameters, of which a byte each is far more than all else that a training keeps.
_WIDE = {"model": {"n_embd": 300}, "measured": True}
CASES["memory"] = Case("mars-adamw", {"max_steps": 2}, **_WIDE)
CASES["memory-bf16"] = Case("mars-adamw", {"max_steps": 2, "bf16": True}, **_WIDE)


def trains(engine: str, name: str) -> bool:
    """Whether an engine can train a case, and no other engine trains the very same."""
    case, (processes, stage) = CASES[name], (ENGINES[engine].processes, ENGINES[engine].stage)
    if engine in MEASURED_ENGINES or case.measured:
        return False
    if "mars_fused" in case.arguments and not (os.environ.get("CXX") or shutil.which("g++")):
        return False
    if "scored" in case.events and engine not in SCORED:
        return False
    if engine in VARIANTS and name not in VARIED and not (stage == 3 and name in RULES):
        return False
    if "zero_init" in case.model:
        return stage == 3 and processes == 2
    if "is_approx" in case.arguments and stage is not None:
        return False  # refused
    if "bypassed" in case.events and stage is not None:
        return False  # ZeRO takes a missing gradient for zero, which decays the parameter and its momentum
    if case.arguments.get("fp16"):
        # accelerate scales no loss on CPUs, nor does DeepSpeed 0.19 at stage 0, which then divides by the scale.
        return processes == 2 and bool(stage) and engine not in ("zero2-round-robin", "zero1-bf16-optimizer")
    if case.arguments.get("bf16"):
        if name == "adamw_torch-bf16" and stage == 0:
            return False  # DeepSpeed steps once more, at the start, without a gradient
        # safe_get_full_fp32_param reads other ranks' weights there
        return processes == 2 and engine != "zero2-round-robin"
    if engine == "zero1-bf16-optimizer":
        return False
    if processes == 3:
        # A third of the batch is no multiple of 4 micro-batches.
        return "gradient_accumulation_steps" not in case.arguments
    return processes == 2
