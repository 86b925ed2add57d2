"""Tensors that several ranks hold whole and equal: DDP, DeepSpeed stage 0."""

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.optim.sharding.base import MatrixFunction, Round, by_shape
from mars_hf.optim.sharding.local import LocalTensors


class ReplicatedTensors(LocalTensors):
    """Every rank holds every tensor whole, so only the work on matrices is divided: each one is done on one rank.

    Communication of a step: one all-gather a round, in which each rank receives the results of the others in the dtype
    of the function's results (`ns_dtype`): with W ranks and N matrix elements (W - 1) / W N elements a step. Memory
    besides: the results of one round, up to W times STACK_ELEMENTS elements.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._replicas = group
        self._rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def on_whole_matrices(
        self, parts: list[Tensor], work: Round, fn: MatrixFunction, dtype: torch.dtype
    ) -> list[Tensor]:
        """Does this rank's share and gathers the others'; see `Sharding.on_whole_matrices`."""
        owners = work.owners
        mine = by_shape([part for part, owner in zip(parts, owners) if owner == self._rank], fn)
        sizes = [sum(p.numel() for p, owner in zip(parts, owners) if owner == r) for r in range(self.ranks)]
        # One size for all, which every backend gathers in one call.
        send = torch.zeros(max(sizes), dtype=dtype, device=parts[0].device)
        if mine:
            torch.cat([result.reshape(-1) for result in mine], out=send[: sizes[self._rank]])
        gathered = send.new_empty(self.ranks * len(send))
        dist.all_gather_into_tensor(gathered, send, group=self._replicas)
        starts = [r * len(send) for r in range(self.ranks)]
        results = []
        for part, owner in zip(parts, owners):
            results.append(gathered[starts[owner] : starts[owner] + part.numel()].view(part.shape))
            starts[owner] += part.numel()
        return results
