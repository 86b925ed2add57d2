"""The engine that runs a training: its name, and what of it cannot be served.

Served are one process, DDP, FSDP2 and DeepSpeed ZeRO-0 to ZeRO-3, with optimizer offload to CPUs. Elsewhere MARS would
become another optimizer without a word, so it is refused before the first step.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments
from transformers.utils import is_sagemaker_mp_enabled

from mars_hf.training.checkpoints import WHOLE, ZERO_FORMATS

# Options of a DeepSpeed configuration that give the optimizer something else than its gradients or its parameters, or
# were never tried: the values that are served (the first is DeepSpeed's default), and what to do.
_SERVED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer": ((None, {}), "DeepSpeed would build that optimizer instead of MARS, remove the block"),
    "scheduler": ((None, {}), "it would override lr_scheduler_type and lr_1d, remove the block"),
    "pipeline": ((None, {}), "pipeline parallelism is not served, use ZeRO or FSDP2"),
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism is not served, use ZeRO-3 or FSDP2"),
    "sequence_parallel_size": ((1,), "sequence parallelism is not served, leave it out"),
    "torch_autocast.enabled": ((False,), "use bf16"),
    "bf16.bf16_master_weights_and_grads": ((False,), "MARS updates float32 master weights, leave it out"),
    "bf16.immediate_grad_update": ((False,), "leave it out"),
    "fp16.fp16_master_weights_and_grads": ((False,), "MARS updates float32 master weights, leave it out"),
    "checkpoint.load_universal": ((False,), "universal checkpoints are not served, resume with as many processes"),
    "gradient_allreduce_op": (("mean",), "the Trainer's loss counts on the mean, leave it out"),
    "zero_optimization.offload_optimizer.device": (("none", "cpu"), "offload to cpu"),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), "MARS steps on one device, leave it out"),
    "zero_optimization.offload_optimizer.super_offload": ((False,), "it is made for DeepSpeed's Adam, leave it out"),
    "zero_optimization.offload_param.device": (("none", "cpu"), "offload to cpu"),
    "zero_optimization.zenflow": ((None,), "it is made for DeepSpeed's Adam, leave it out"),
    "zero_optimization.zero_hpz_partition_size": ((1, 0), "leave it out"),
    "zero_optimization.zero_quantized_weights": ((False,), "compressed communication is not served, leave it out"),
    "zero_optimization.zero_quantized_gradients": ((False,), "compressed communication is not served, leave it out"),
}


def prepare_engine(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuses an engine that MARS does not serve, and sets what no launch file can say. Call it before it is made.

    Args:
        args: the training arguments.
        model: the model to train; only read.

    Raises:
        ValueError: with one line that says what to use instead.
    """
    for problem in _problems(args, model):
        raise ValueError(problem)
    deepspeed, fsdp = _plugin("deepspeed_plugin"), _plugin("fsdp_plugin")
    if deepspeed is not None:
        # Otherwise Accelerate replaces an optimizer that is offloaded to CPUs by DeepSpeed's Adam.
        deepspeed.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    if fsdp is not None and fsdp.mixed_precision_policy is not None:
        # Accelerate would add up the gradients in bf16, and round what the model returns to it, the loss included.
        dtype = fsdp.mixed_precision_policy.param_dtype
        fsdp.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def engine_name() -> str:
    """The engine at hand, as a user would call it."""
    deepspeed, fsdp = _plugin("deepspeed_plugin"), _plugin("fsdp_plugin")
    if deepspeed is not None:
        return f"DeepSpeed ZeRO-{deepspeed.zero_stage}"
    if fsdp is not None:
        return f"FSDP{fsdp.fsdp_version}"
    return "DDP" if AcceleratorState._shared_state and AcceleratorState().num_processes > 1 else "one process"


def running_format() -> str:
    """How the engine at hand writes checkpoints, as `checkpoints.saved_format` names it."""
    deepspeed, fsdp = _plugin("deepspeed_plugin"), _plugin("fsdp_plugin")
    if deepspeed is not None:
        return ZERO_FORMATS[deepspeed.zero_stage]
    if fsdp is not None:
        return f"FSDP {fsdp.state_dict_type.name}"
    return WHOLE


def replicas() -> dist.ProcessGroup | None:
    """The ranks, where each of them holds the whole model and its gradients: DDP and DeepSpeed ZeRO-0."""
    if not AcceleratorState._shared_state or AcceleratorState().num_processes == 1:
        return None
    return dist.group.WORLD if running_format() in (WHOLE, ZERO_FORMATS[0]) else None


def _plugin(name: str) -> Any:
    """A plugin of the Accelerator that was made last, or None."""
    return getattr(AcceleratorState(), name, None) if AcceleratorState._shared_state else None


def _problems(args: TrainingArguments, model: nn.Module | None) -> Iterator[str]:
    """What cannot be served, most fundamental first."""
    launched = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if args.world_size != launched:
        yield f"WORLD_SIZE={launched}: these processes would each train alone, on CPUs add --use_cpu true"
    if is_sagemaker_mp_enabled():
        yield "SageMaker model parallelism is not served: use DDP, FSDP2 or DeepSpeed ZeRO"
    state = AcceleratorState() if AcceleratorState._shared_state else None
    if getattr(state, "distributed_type", None) == DistributedType.MEGATRON_LM:
        yield "Megatron-LM is not served: use DDP, FSDP2 or DeepSpeed ZeRO"
    parallel = args.parallelism_config or getattr(state, "parallelism_config", None)
    for dimension in ("tp", "cp", "sp", "dp_replicate"):
        size = getattr(parallel, f"{dimension}_size", 1) or 1
        if size > 1:
            yield f"parallelism_config: {dimension}_size={size} is not served, shard in one dimension (dp_shard_size)"
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        yield "model: it was sharded while it was loaded (distributed_config, tp_plan): load it whole and launch FSDP2"
    yield from _fsdp_problems(args)
    plugin = _plugin("deepspeed_plugin")
    if plugin is not None:
        yield from _deepspeed_problems(args, plugin.deepspeed_config)
    elif args.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        yield "deepspeed was asked for, but Accelerate runs something else: on CPUs unset ACCELERATE_USE_CPU"


def _fsdp_problems(args: TrainingArguments) -> Iterator[str]:
    if args.fsdp and isinstance(args.fsdp_config, dict) and args.fsdp_config.get("xla"):
        yield "fsdp_config: xla=True is not served, use FSDP2 on GPUs"
    plugin = _plugin("fsdp_plugin")
    if plugin is None:
        if args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
            yield "fsdp was asked for, but Accelerate runs something else: it serves FSDP on GPUs only, on CPUs use DDP"
        return
    if plugin.fsdp_version != 2:
        yield f"fsdp_version={plugin.fsdp_version} flattens parameters, where MARS finds no matrix: use fsdp_version 2"
    if AcceleratorState().mixed_precision == "fp16":
        yield "fp16 under FSDP2 is not served: use bf16"
    if type(plugin.cpu_offload).__name__ != "OffloadPolicy":
        yield "FSDP2 with parameters offloaded to CPUs is not served: use DeepSpeed ZeRO-3 with offload"


def _deepspeed_problems(args: TrainingArguments, config: dict[str, Any]) -> Iterator[str]:
    for name, (served, way_out) in _SERVED_OPTIONS.items():
        value: Any = config
        for key in name.split("."):
            value = (value or {}).get(key)
        if value is not None and value not in served:
            shown = "{...}" if isinstance(value, dict) else repr(value)
            yield f"DeepSpeed configuration: {name}={shown} is not served: {way_out}"
    fp16, zero = (config.get(name) or {} for name in ("fp16", "zero_optimization"))
    if fp16.get("enabled") is True and not zero.get("stage"):
        # DeepSpeed divides the gradients by a loss scale there that the loss was never multiplied by.
        yield "fp16 under DeepSpeed ZeRO-0 is not served: use ZeRO-1, or bf16"
    clipping = config.get("gradient_clipping") or 0.0
    if clipping not in ("auto", args.max_grad_norm):
        yield (
            f"DeepSpeed configuration: gradient_clipping={clipping} would win over max_grad_norm={args.max_grad_norm}, "
            "write gradient_clipping: auto"
        )
