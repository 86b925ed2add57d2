"""The engines under test: how many processes, what the Trainer is told, and what must be true once training runs."""

from dataclasses import dataclass, field, replace
from typing import Any

# Small enough that every matrix of the test model is partitioned, and spread over several buckets and sub-groups.
BUCKET = 3000


@dataclass(frozen=True)
class Engine:
    """One way to train on several processes.

    Args:
        distributed_type: what accelerate must report.
        processes: how many ranks.
        arguments: fields of `TrainingArguments` that choose the engine.
        stage: ZeRO stage, None without DeepSpeed.
        offload: the optimizer's state and step are on the CPU side of DeepSpeed.
        bucket_view: DDP's gradients are views of its buckets; TrainingArguments have no field for it.
        wrapper: the class that DeepSpeed must have put around the optimizer, "" for any.
    """

    distributed_type: str
    processes: int = 2
    arguments: dict[str, Any] = field(default_factory=dict)
    stage: int | None = None
    offload: bool = False
    bucket_view: bool = False
    wrapper: str = ""


def fsdp2(processes: int = 2) -> Engine:
    """FSDP2, one shard group per transformer block, as transformers wraps by default."""
    config = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    return Engine("FSDP", processes, {"fsdp": True, "fsdp_config": config})


def zero(
    stage: int, processes: int = 2, *, offload: bool = False, accumulation: str | None = None, **options: Any
) -> Engine:
    """DeepSpeed ZeRO; `options` go into its section `zero_optimization`, `accumulation` is the dtype of that name."""
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET}
    if stage == 3:
        section |= {"sub_group_size": BUCKET, "stage3_param_persistence_threshold": 0}
        section |= {"stage3_prefetch_bucket_size": BUCKET}
    else:
        section["allgather_bucket_size"] = BUCKET
    section |= options
    if offload:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": section,
        # Otherwise offload accepts DeepSpeed's own Adam alone.
        "zero_force_ds_cpu_optimizer": False,
    }
    if accumulation is not None:
        config["data_types"] = {"grad_accum_dtype": accumulation}
    return Engine("DEEPSPEED", processes, {"deepspeed": config}, stage=stage, offload=offload)


ENGINES = {
    "one": Engine("NO", processes=1),
    "ddp": Engine("MULTI_CPU"),
    "ddp-bucket-view": Engine("MULTI_CPU", bucket_view=True),
    "fsdp2": fsdp2(),
    "zero0": zero(0),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero2-offload": zero(2, offload=True),
    "zero3-offload": zero(3, offload=True),
    "zero2-round-robin": zero(2, round_robin_gradients=True),
    # For bf16 with gradients accumulated in float32 DeepSpeed has another wrapper.
    "zero1-bf16-optimizer": replace(zero(1, accumulation="fp32"), wrapper="BF16_Optimizer"),
    "ddp-3": Engine("MULTI_CPU", processes=3),
    "fsdp2-3": fsdp2(processes=3),
    "zero2-3": zero(2, processes=3),
    "zero3-3": zero(3, processes=3),
}

# To measure memory by: few buckets for a larger model, and ZeRO-3 steps everything at once, DeepSpeed's default.
_ROOMY = {"reduce_bucket_size": 50_000}
MEASURED_ENGINES = {
    "zero1-roomy": zero(1, allgather_bucket_size=50_000, **_ROOMY),
    "zero2-roomy": zero(2, allgather_bucket_size=50_000, **_ROOMY),
    "zero3-roomy": zero(3, sub_group_size=10**9, stage3_prefetch_bucket_size=50_000, **_ROOMY),
    "zero2-3-roomy": zero(2, processes=3, allgather_bucket_size=50_000, **_ROOMY),
}
ENGINES |= MEASURED_ENGINES
