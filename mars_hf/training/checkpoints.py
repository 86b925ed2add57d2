"""Which checkpoint of a run can be resumed."""

import re
from pathlib import Path

# What a resume needs to go on bit for bit. The Trainer writes trainer_state.json last, and starts the optimizer afresh,
# without a word, where optimizer.pt is missing.
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint of a run, by step, or None.

    Args:
        output_dir: the run's `output_dir`; a checkpoint whose writing was interrupted is passed over.
    """
    steps = [(int(match[1]), path) for path in Path(output_dir).glob("checkpoint-*") if (match := _step(path))]
    complete = [(step, path) for step, path in steps if not _missing(path)]
    return str(max(complete)[1]) if complete else None


def checkpoint_to_resume(resume: str | None, output_dir: str | Path) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` means.

    Args:
        resume: a checkpoint, "true" for the newest of `output_dir`, None or "false" for a fresh run.
        output_dir: the run's `output_dir`.

    Raises:
        ValueError: there is no such checkpoint, something in it is missing, or a fresh run would mix its checkpoints
            with those of another.
    """
    last = last_checkpoint(output_dir)
    if resume is None or resume.lower() == "false":
        if last is not None:
            raise ValueError(
                f"output_dir={str(output_dir)!r} holds the run of {Path(last).name}: resume it with "
                "--resume_from_checkpoint true, or choose another --output_dir, or remove it"
            )
        return None
    if resume.lower() == "true":
        if last is None:
            raise ValueError(f"resume_from_checkpoint=true, but {str(output_dir)!r} holds no complete checkpoint")
        return last
    missing = _missing(Path(resume))
    if missing:
        raise ValueError(f"resume_from_checkpoint={resume!r} cannot be resumed: {', '.join(missing)} is missing")
    return resume


def _step(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def _missing(path: Path) -> list[str]:
    return [name for name in NEEDED if not (path / name).is_file()]
