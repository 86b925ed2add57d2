"""Ordinary tensors: every rank that has one has it whole."""

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.optim.sharding.base import MatrixFunction, Round, by_shape


class LocalTensors:
    """Each tensor is whole on this rank, so nothing is communicated."""

    whole = True
    group: dist.ProcessGroup | None = None
    ranks = 1

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors themselves; see `Sharding.parts`."""
        return tensors

    def shapes(self, parts: list[Tensor]) -> list[tuple[int, ...]]:
        """Their own shapes; see `Sharding.shapes`."""
        return [tuple(part.shape) for part in parts]

    def on_whole_matrices(
        self, parts: list[Tensor], work: Round, fn: MatrixFunction, dtype: torch.dtype
    ) -> list[Tensor]:
        """The function itself; see `Sharding.on_whole_matrices`."""
        return by_shape(parts, fn)
