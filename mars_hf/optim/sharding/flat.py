"""Tensors of which each rank holds a stretch of the flattened elements: FSDP2 and DeepSpeed ZeRO."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.optim.sharding.base import MatrixFunction, Round, by_shape, communication_device


class Slices(NamedTuple):
    """A whole tensor and what each rank holds of it: elements start to stop of the tensor laid out in one row."""

    shape: tuple[int, ...]
    ranges: list[tuple[int, int]]


class FlatShards:
    """Each rank holds a stretch, maybe empty, of the elements of each tensor. Each engine's own class adds `parts`.

    The work on whole matrices is divided: each one is put together on one rank, worked on there once, and its parts
    are sent back. Communication of a step: one all-reduce of one number a tensor for the norms; for matrix rules two
    all-to-alls a round, in which each rank sends its own N / W elements, first in the dtype of the momentum, then as
    much in that of the results (`ns_dtype`). Memory besides: what a rank sends, receives and works on in one round, up
    to STACK_ELEMENTS elements of each. Nobody ever holds all matrices. Parts offloaded to CPUs, from where the ranks
    cannot send them, travel between the accelerators, which do the work too.

    Args:
        tensors: the whole tensors.
        group: the ranks, in the order of `Slices.ranges`.
    """

    whole = False

    def __init__(self, tensors: list[Slices], group: dist.ProcessGroup) -> None:
        self._tensors = tensors
        self.group: dist.ProcessGroup | None = group
        self._rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def shapes(self, parts: list[Tensor]) -> list[tuple[int, ...]]:
        """See `Sharding.shapes`."""
        return [t.shape for t in self._tensors]

    def on_whole_matrices(
        self, parts: list[Tensor], work: Round, fn: MatrixFunction, dtype: torch.dtype
    ) -> list[Tensor]:
        """Sends each matrix to its rank and the parts of the result back; see `Sharding.on_whole_matrices`."""
        # Places in the round, by the rank that works on them.
        places = [[k for k, owner in enumerate(work.owners) if owner == r] for r in range(self.ranks)]
        mine = [self._tensors[work.where[k]] for k in places[self._rank]]
        device = communication_device(self.group, parts[0].device)
        received = self._exchange(
            [[parts[k] for k in places[r]] for r in range(self.ranks)],
            [[stop - start for start, stop in (t.ranges[r] for t in mine)] for r in range(self.ranks)],
            parts[0].new_empty(0, device=device),
        )
        matrices = [torch.cat([received[r][j] for r in range(self.ranks)]).view(t.shape) for j, t in enumerate(mine)]
        results = [result.reshape(-1) for result in by_shape(matrices, fn)]
        returned = self._exchange(
            [[result[slice(*t.ranges[r])] for result, t in zip(results, mine)] for r in range(self.ranks)],
            [[parts[k].numel() for k in places[r]] for r in range(self.ranks)],
            parts[0].new_empty(0, dtype=dtype),
        )
        part_of = {k: part for ks, came in zip(places, returned) for k, part in zip(ks, came)}
        return [part_of[k].view(part.shape) for k, part in enumerate(parts)]

    def _exchange(self, send: list[list[Tensor]], sizes: list[list[int]], like: Tensor) -> list[list[Tensor]]:
        """Sends tensors to each rank, flattened; returns those that came from each rank, which have the given sizes.

        All have the dtype of `like`, what is returned is on its device.
        """
        everything = [t.reshape(-1) for to_rank in send for t in to_rank]
        outgoing = torch.cat(everything) if everything else like
        outgoing = outgoing.to(communication_device(self.group, outgoing.device))
        incoming = outgoing.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            incoming,
            outgoing,
            [sum(from_rank) for from_rank in sizes],
            [sum(t.numel() for t in to_rank) for to_rank in send],
            group=self.group,
        )
        pieces = iter(incoming.to(like.device).split([size for from_rank in sizes for size in from_rank]))
        return [[next(pieces) for _ in from_rank] for from_rank in sizes]
