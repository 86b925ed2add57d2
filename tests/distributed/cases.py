"""What is trained under every engine: the rules, and the circumstances in which they must still hold."""

from dataclasses import dataclass, field, replace
from typing import Any

from engines import ENGINES

# Both clips bite at some steps and tensors and not at others; `test_clips_bite` makes sure of it.
MAX_GRAD_NORM, CLIP_C = 0.5, 0.05

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
    """

    rule: str
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    reference: str = ""

    @property
    def tolerance(self) -> float:
        return NEWTON_SCHULZ if self.rule in ORTHOGONAL else ELEMENTWISE

    def job(self, name: str, engine: str) -> dict[str, Any]:
        """What the worker reads."""
        arguments = {"max_grad_norm": MAX_GRAD_NORM, **RULES[self.rule], **self.arguments}
        return {"name": name, "engine": engine, "arguments": arguments, "model": self.model, "events": self.events}


# With a constant lr the step after a lost one does not depend on their number.
_CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}
_LOST = 4

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
    **{
        f"{rule}-bypassed": Case(rule, events={"bypassed": [0, 1, 5]})
        for rule in ("mars-adamw", "mars-m", "adamw_torch")
    },
    **{f"{rule}-bf16": Case(rule, {"bf16": True}) for rule in ("mars-adamw", "mars-shampoo", "mars-m", "adamw_torch")},
}
for _rule in ("mars-adamw", "mars-m", "adamw_torch"):
    for _precision in ("bf16", "fp16"):
        _case = Case(_rule, {_precision: True, **_CONSTANT})
        CASES[f"{_rule}-{_precision}-overflow"] = replace(_case, events={"infinite_loss": _LOST})
        CASES[f"{_rule}-{_precision}-lost"] = replace(
            _case, arguments={**_case.arguments, "max_steps": 9}, events={"lost_batch": _LOST}
        )

FLOAT32 = [name for name, case in CASES.items() if not case.arguments.keys() & {"bf16", "fp16"}]
BF16 = [name for name in CASES if name.endswith("-bf16")]
LOW_PRECISION = [
    f"{rule}-{precision}" for rule in ("mars-adamw", "mars-m", "adamw_torch") for precision in ("bf16", "fp16")
]


def trains(engine: str, name: str) -> bool:
    """Whether an engine can train a case at all, and another engine does not train the very same."""
    case, stage = CASES[name], ENGINES[engine].stage
    if engine in ("one", "zero1-bf16"):
        return False
    if "zero_init" in case.model and stage != 3:
        return False
    # ZeRO takes a missing gradient for zero, which decays the parameter and its momentum.
    if "bypassed" in case.events and stage is not None:
        return False
    # A third of 24 sequences is no multiple of 4 micro-batches; stock AdamW has shown on 2 processes what it can show.
    return ENGINES[engine].processes == 2 or (case.rule != "adamw_torch" and not case.arguments)
