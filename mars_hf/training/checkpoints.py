"""Which checkpoint of a run can be resumed, under which engine."""

import json
import re
from pathlib import Path

# Each engine writes checkpoints of its own kind. A launch file chooses the engine, and FSDP's fsdp_state_dict_type.
WHOLE = "one process or DDP"
FSDP_SHARDED, FSDP_FULL = "FSDP SHARDED_STATE_DICT", "FSDP FULL_STATE_DICT"
ZERO_FORMATS = ("DeepSpeed ZeRO-0", "DeepSpeed ZeRO-1 or 2", "DeepSpeed ZeRO-1 or 2", "DeepSpeed ZeRO-3")

# What a resume needs to go on bit for bit, as glob patterns; `{rank}` stands for every rank. The Trainer writes
# trainer_state.json last, and starts the optimizer afresh, without a word, where optimizer.pt is missing.
NEEDED = {
    WHOLE: ("trainer_state.json", "optimizer.pt", "scheduler.pt"),
    FSDP_SHARDED: (
        "trainer_state.json",
        "scheduler.pt",
        "pytorch_model_fsdp_0/.metadata",
        "optimizer_0/.metadata",
    ),
    FSDP_FULL: ("trainer_state.json", "scheduler.pt", "pytorch_model_fsdp.bin", "optimizer.bin"),
    "DeepSpeed ZeRO-0": ("trainer_state.json", "scheduler.pt", "latest", "global_step*/mp_rank_00_model_states.pt"),
    "DeepSpeed ZeRO-1 or 2": (
        "trainer_state.json",
        "scheduler.pt",
        "latest",
        "global_step*/mp_rank_00_model_states.pt",
        "global_step*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    ),
    "DeepSpeed ZeRO-3": (
        "trainer_state.json",
        "scheduler.pt",
        "latest",
        "global_step*/zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        "global_step*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    ),
}
# What tells a format, the first that matches.
_SIGNS = (
    ("global_step*/zero_pp_rank_*_model_states.pt", "DeepSpeed ZeRO-3"),
    ("global_step*/*_optim_states.pt", "DeepSpeed ZeRO-1 or 2"),
    ("global_step*", "DeepSpeed ZeRO-0"),
    ("pytorch_model_fsdp_0", FSDP_SHARDED),
    ("pytorch_model_fsdp.bin", FSDP_FULL),
)


def saved_format(checkpoint: str | Path) -> str:
    """The format of a checkpoint, a key of `NEEDED`."""
    return next((name for sign, name in _SIGNS if any(Path(checkpoint).glob(sign))), WHOLE)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint of a run, by step, or None.

    Args:
        output_dir: the run's `output_dir`; a checkpoint whose writing was interrupted is passed over.
    """
    steps = [(int(match[1]), path) for path in Path(output_dir).glob("checkpoint-*") if (match := _step(path))]
    complete = [(step, path) for step, path in steps if not _missing(path)]
    return str(max(complete)[1]) if complete else None


def checkpoint_to_resume(resume: str | None, output_dir: str | Path, max_steps: int = -1) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` means.

    Args:
        resume: a checkpoint, "true" for the newest of `output_dir`, None or "false" for a fresh run.
        output_dir: the run's `output_dir`.
        max_steps: optimizer steps of the whole run, if that is known: the Trainer would add one to a finished run.

    Raises:
        ValueError: there is no such checkpoint, something in it is missing, its run is finished, or a fresh run would
            mix its checkpoints with those of another.
    """
    last = last_checkpoint(output_dir)
    if resume is None or resume.lower() == "false":
        if last is not None:
            raise ValueError(
                f"output_dir={str(output_dir)!r} holds a run up to {Path(last).name}: choose another --output_dir, "
                "remove it, or, if it was interrupted, go on with --resume_from_checkpoint true"
            )
        return None
    if resume.lower() == "true":
        if last is None:
            raise ValueError(f"resume_from_checkpoint=true, but {str(output_dir)!r} holds no complete checkpoint")
        resume = last
    check_complete(resume)
    done = json.loads((Path(resume) / "trainer_state.json").read_text())["global_step"]
    if 0 < max_steps <= done:
        raise ValueError(
            f"resume_from_checkpoint={resume!r}: all {max_steps} steps are done, raise --max_steps to go on"
        )
    return resume


def check_complete(checkpoint: str) -> None:
    """Raises ValueError with what is missing in a checkpoint."""
    missing = _missing(Path(checkpoint))
    if missing:
        raise ValueError(f"resume_from_checkpoint={checkpoint!r} cannot be resumed: {', '.join(missing)} is missing")


def check_format(checkpoint: str, running: str, processes: int, bf16: bool) -> None:
    """Refuses a checkpoint that the engine at hand cannot read.

    Args:
        checkpoint: a complete checkpoint.
        running: the format of the engine at hand, a key of `NEEDED`.
        processes: the number of processes at hand. ZeRO cannot redistribute its partitions, every other engine can.
        bf16: whether it computes in bfloat16, which matters to ZeRO alone.

    Raises:
        ValueError: it was saved by another engine, or by ZeRO on another number of processes or in another precision.
    """
    saved, here = saved_format(checkpoint), running
    if saved == running and saved in ZERO_FORMATS[1:]:
        in_bf16 = any(Path(checkpoint).glob("global_step*/bf16_zero_*"))
        saved += f" on {_ranks(Path(checkpoint))} processes with{'' if in_bf16 else 'out'} bf16"
        here += f" on {processes} processes with{'' if bf16 else 'out'} bf16"
    if saved != here:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} was saved by {saved}, this is {here}: launch it as it was saved"
        )


def _step(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def _ranks(checkpoint: Path) -> int:
    """How many processes saved a checkpoint: each leaves the state of its random number generators."""
    return max(1, len(list(checkpoint.glob("rng_state_*.pth"))))


def _missing(checkpoint: Path) -> list[str]:
    missing = []
    for pattern in NEEDED[saved_format(checkpoint)]:
        for rank in range(_ranks(checkpoint) if "{rank}" in pattern else 1):
            if not any(checkpoint.glob(pattern.format(rank=rank))):
                missing.append(pattern.format(rank=rank))
    for metadata in checkpoint.glob("*/.metadata"):
        missing += _missing_shards(metadata.parent)
    return missing


def _missing_shards(folder: Path) -> list[str]:
    """Files of torch.distributed.checkpoint that its .metadata lists and that are not there."""
    from torch.distributed.checkpoint import FileSystemReader

    listed = {entry.relative_path for entry in FileSystemReader(folder).read_metadata().storage_data.values()}
    return sorted(f"{folder.name}/{name}" for name in listed if not (folder / name).is_file())
