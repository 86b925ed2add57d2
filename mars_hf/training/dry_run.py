"""What a run will be and need, before it starts: nothing is trained, downloaded or written for it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, get_scheduler
from transformers.trainer_utils import SaveStrategy

from mars_hf.optim import MARS
from mars_hf.training.arguments import OPTIM_NAMES, MARSTrainingArguments, optim_name
from mars_hf.training.memory import ENGINES, Memory, run_memory
from mars_hf.training.trainer import mars_optimizer


@dataclass
class PlanArguments:
    """What a run is planned with; a dataclass for `parse_config`."""

    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences of an optimizer step on all processes together. gradient_accumulation_steps follows "
            "from it, so that a run is the same on any number of processes."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print model, param groups, tokens, schedule, memory and disk; train nothing."},
    )
    processes: int | None = field(
        default=None, metadata={"help": "Number of processes that dry_run plans for. Default: those launched."}
    )


def apply_global_batch(args: MARSTrainingArguments, plan: PlanArguments) -> None:
    """Sets `args.gradient_accumulation_steps` so that a step takes `plan.global_batch_size` sequences.

    Args:
        args: changed in place, if `plan.global_batch_size` is given.
        plan: for `plan.processes` processes in a dry run, else for those launched.

    Raises:
        ValueError: the batch is no multiple of what all processes take at once, `gradient_accumulation_steps` says
            something else, or `processes` is below 1 or given for a run that trains.
    """
    if plan.processes is not None and (plan.processes < 1 or not plan.dry_run):
        raise ValueError(f"processes={plan.processes}: give it with --dry_run, 1 or more; a run has those launched")
    if plan.global_batch_size is None:
        return
    at_once = args.per_device_train_batch_size * _processes(args, plan)
    steps, rest = divmod(plan.global_batch_size, at_once)
    if rest or steps < 1:
        raise ValueError(
            f"global_batch_size={plan.global_batch_size} is no multiple of per_device_train_batch_size="
            f"{args.per_device_train_batch_size} x {_processes(args, plan)} processes: choose another "
            "--per_device_train_batch_size or number of processes"
        )
    if args.gradient_accumulation_steps not in (1, steps):
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} contradicts global_batch_size="
            f"{plan.global_batch_size}, which makes it {steps}: leave one of them out"
        )
    args.gradient_accumulation_steps = steps


def describe_run(model: nn.Module, args: MARSTrainingArguments, plan: PlanArguments, block_size: int) -> str:
    """Describes a run in some thirty lines.

    Args:
        model: on the meta device, or any other; only read.
        args: after `apply_global_batch`.
        plan: says for how many processes.
        block_size: tokens of a sequence.

    Raises:
        ValueError: an optimizer that is not of this package, or as `mars_optimizer`.
    """
    if optim_name(args) not in OPTIM_NAMES:
        raise ValueError(
            f"optim={optim_name(args)!r}: dry_run knows mars_hf alone, AdamW is optim mars, mars_type adamw"
        )
    # The Trainer's own grouping reads nothing of a Trainer.
    decay_names = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    cls, arguments = mars_optimizer(args, model, decay_names, own_trainer=True)
    optimizer = cls(**arguments)
    processes = _processes(args, plan)
    sections = [
        _model(model),
        _groups(optimizer, args),
        _tokens(args, processes, block_size),
        _schedule(args),
        _memory(model, optimizer, args, processes),
        _disk(run_memory(model, optimizer.param_groups, engine="single", dtype=torch.float32, processes=1), args),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _processes(args: MARSTrainingArguments, plan: PlanArguments) -> int:
    return plan.processes or args.world_size * max(1, args.n_gpu)


def _model(model: nn.Module) -> Iterator[str]:
    counts = {
        trains: sum(p.numel() for p in model.parameters() if p.requires_grad is trains) for trains in (True, False)
    }
    yield f"model: {type(model).__name__}, {counts[True]:,} parameters train, {counts[False]:,} are frozen"


def _groups(optimizer: MARS, args: MARSTrainingArguments) -> Iterator[str]:
    columns = "{:<13}{:>9}{:>9}{:>7}{:>13}{:>8}{:>8}{:>8}{:>15}".format
    yield "param groups:"
    yield columns("rule", "peak lr", "last lr", "decay", "betas", "gamma", "clip c", "tensors", "parameters")
    # Before a scheduler sets them to those of the first step.
    peaks = [group["lr"] for group in optimizer.param_groups]
    last = _last_factor(optimizer, args)
    for group, peak in zip(optimizer.param_groups, peaks):
        is_mars = group["rule"].startswith("mars-")
        yield columns(
            group["rule"],
            f"{peak:.3g}",
            "?" if last is None else f"{peak * last:.3g}",
            f"{group['weight_decay']:g}",
            "{:g}, {:g}".format(*group["betas"]),
            f"{group['gamma']:g}" if is_mars else "-",
            f"{group['clip_c']:.3g}" if is_mars and group["clip_c"] is not None else "-",
            len(group["params"]),
            f"{sum(p.numel() for p in group['params']):,}",
        )


def _last_factor(optimizer: MARS, args: MARSTrainingArguments) -> float | None:
    """What the schedule multiplies every peak learning rate by in the end; None where training itself decides that."""
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(max(args.max_steps, 0)),
        num_training_steps=args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]
    )
    return scheduler.lr_lambdas[0](args.max_steps) if isinstance(scheduler, LambdaLR) and args.max_steps > 0 else None


def _tokens(args: MARSTrainingArguments, processes: int, block_size: int) -> Iterator[str]:
    sequences, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    tokens = sequences * accumulation * processes * block_size
    yield (
        f"a step: {sequences} sequences x {accumulation} micro-batches x {processes} processes x {block_size:,} tokens "
        f"= {tokens:,} tokens, global clip {args.max_grad_norm:.3g}"
    )
    if args.max_steps > 0:
        yield f"the run: {args.max_steps:,} steps, {tokens * args.max_steps:,} tokens"
    else:
        yield f"the run: {args.num_train_epochs:g} epochs of the corpus, which is not read here"


def _schedule(args: MARSTrainingArguments) -> Iterator[str]:
    warmup = args.get_warmup_steps(args.max_steps) if args.max_steps > 0 else args.warmup_steps
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    options = f" {args.lr_scheduler_kwargs}" if args.lr_scheduler_kwargs else ""
    yield f"schedule: warm-up of {warmup:,} steps to the peak, then {name}{options}"


def _memory(model: nn.Module, optimizer: MARS, args: MARSTrainingArguments, processes: int) -> Iterator[str]:
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    columns = "{:<15}{:>13}{:>13}  {:<32}{:>13}".format
    yield f"memory of a process, {processes} processes in {str(dtype).removeprefix('torch.')}:"
    yield columns("launch file", "weights", "gradients", "state by rule", "together")
    for engine in ENGINES:
        if (engine == "single") != (processes == 1):
            continue
        memory = run_memory(model, optimizer.param_groups, engine=engine, dtype=dtype, processes=processes)
        states = ", ".join(f"{rule} {_size(size)}" for rule, size in memory.states.items())
        host = f", of it {_size(memory.host)} in the machine's memory" if memory.host else ""
        yield columns(engine, _size(memory.parameters), _size(memory.gradients), states, _size(memory.total)) + host
    yield "Activations, communication buffers and gathered or half-precision copies of weights come on top."


def _disk(whole: Memory, args: MARSTrainingArguments) -> Iterator[str]:
    folder = Path(str(args.output_dir)).absolute()
    written = _checkpoints(args)
    # The oldest checkpoint is removed after the newest is written.
    limits = (written, args.save_total_limit + 1 if args.save_total_limit else None)
    kept = min((limit for limit in limits if limit is not None), default=None)
    each = whole.parameters + (0 if args.save_only_model else sum(whole.states.values()))
    needed = (1 if kept is None else kept) * each + whole.parameters
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    counts = ["?" if count is None else f"{count:,}" for count in (written, kept)]
    yield f"checkpoints: {counts[0]} of {_size(each)}, at most {counts[1]} at a time (ZeRO in 16 bits writes more)"
    yield (
        f"disk: {'at least ' if kept is None else ''}{_size(needed)} with the final model in {folder}, "
        f"{_size(free)} free{'' if needed <= free else ': NOT ENOUGH'}"
    )


def _checkpoints(args: MARSTrainingArguments) -> int | None:
    """How many a run writes; None where that depends on the corpus or on the losses."""
    if args.save_strategy == SaveStrategy.NO:
        return 0
    if args.save_strategy != SaveStrategy.STEPS or args.max_steps <= 0:
        return None
    # A fraction of 1 is one of all steps; the last step is saved in any case.
    every = args.save_steps if args.save_steps >= 1 else ceil(args.max_steps * args.save_steps)
    return ceil(args.max_steps / every)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
