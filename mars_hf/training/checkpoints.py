"""Which checkpoint of a run can be resumed."""

import json
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
    missing = _missing(Path(resume))
    if missing:
        raise ValueError(f"resume_from_checkpoint={resume!r} cannot be resumed: {', '.join(missing)} is missing")
    done = json.loads((Path(resume) / "trainer_state.json").read_text())["global_step"]
    if 0 < max_steps <= done:
        raise ValueError(
            f"resume_from_checkpoint={resume!r}: all {max_steps} steps are done, raise --max_steps to go on"
        )
    return resume


def _step(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def _missing(path: Path) -> list[str]:
    return [name for name in NEEDED if not (path / name).is_file()]
