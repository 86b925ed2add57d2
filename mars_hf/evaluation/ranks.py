"""Several processes that score together: who does what, and that a failure of one is a failure of all."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes of `torch.distributed`, or this one alone.

    Args:
        together: All processes make the same calls of this object's methods, in the same order.
    """

    def __init__(self, together: bool) -> None:
        several = together and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Calls `compute` on every process and gives all of them all results, in the order of the ranks.

        Raises:
            Exception: `compute` failed here; it is raised as it was.
            ValueError: `compute` failed on another process only.
        """
        if self.size == 1:
            return [compute()]
        outcome: tuple[Any, str | None]
        failure = None
        try:
            outcome = (compute(), None)
        except Exception as error:  # whatever it is: the other processes wait for this one
            outcome, failure = (None, " ".join(str(error).split()) or type(error).__name__), error
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, outcome)
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise ValueError(f"process {rank} failed: {message}")
        return [result for result, _ in outcomes]

    def agree(self, compute: Callable[[], T]) -> T:
        """Calls `compute` on every process and gives each its own result.

        Raises:
            Exception: see `gather`.
        """
        own: list[T] = []
        self.gather(lambda: own.append(compute()))
        return own[0]

    def share(self, jobs: Sequence[Any], run: Callable[[Any], T]) -> list[T]:
        """`[run(job) for job in jobs]` on every process, the jobs dealt out in turn.

        All processes call `run` equally often, those without a job left on the last one again: a model in shards needs
        every process in each of its forward passes.

        Raises:
            Exception: see `gather`; after the round of jobs in which one failed.
        """
        results: list[T] = []
        for first in range(0, len(jobs), self.size):
            mine = jobs[min(first + self.rank, len(jobs) - 1)]
            results += self.gather(lambda mine=mine: run(mine))  # type: ignore[misc]
        return results[: len(jobs)]
