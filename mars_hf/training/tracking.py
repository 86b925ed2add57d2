"""What trackers log besides losses, and whether they are there."""

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK


@functools.cache
def git_revision() -> str | None:
    """The commit of the checkout that the running script is in, with "-dirty" where files differ; None without one."""
    folder = Path(sys.argv[0]).resolve().parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Raises ValueError for a tracker that the Trainer knows and that is not installed.

    Args:
        report_to: as `TrainingArguments` holds it, a list of names.
    """
    for name in sorted(INTEGRATION_TO_CALLBACK.keys() & set(report_to or ())):
        if name not in get_available_reporting_integrations():
            raise ValueError(f"report_to={name!r} is not installed: install its package or use report_to='none'")
