"""FSDP2: parameters are DTensors, each rank holds some of the rows."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Replicate

from mars_hf.optim.sharding.base import Sharding
from mars_hf.optim.sharding.flat import FlatShards, Slices
from mars_hf.optim.sharding.local import LocalTensors


class LocalDTensors(LocalTensors):
    """DTensors that every rank holds whole."""

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Their local tensors; see `Sharding.parts`."""
        return [local(t) for t in tensors]


class ShardedDTensors(FlatShards):
    """DTensors sharded on dimension 0 over one dimension of their mesh, replicated over the others (HSDP).

    Args:
        tensors: parameters that share mesh and placements; only their layout is read.
        dim: the dimension of the mesh over which they are sharded.
    """

    def __init__(self, tensors: list[Any], dim: int) -> None:
        mesh = tensors[0].device_mesh
        super().__init__(
            [Slices(tuple(t.shape), _row_ranges(t.shape, mesh.size(dim))) for t in tensors], mesh.get_group(dim)
        )

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Their local tensors; see `Sharding.parts`."""
        return [local(t) for t in tensors]


def dtensor_sharding(tensors: list[Any], name: str) -> Sharding:
    """How DTensors that share mesh and placements are laid out.

    Args:
        tensors: the parameters.
        name: how to call them in an error.

    Raises:
        ValueError: a layout that is not that of FSDP2.
    """
    placements = tensors[0].placements
    sharded = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return LocalDTensors()
    if len(sharded) > 1 or type(placements[sharded[0]]) is not Shard or placements[sharded[0]] != Shard(0):
        raise ValueError(
            f"{name} has the placements {placements}, MARS serves one Shard(0): use FSDP2 (fully_shard) without "
            "tensor parallelism and without shard_placement_fn"
        )
    return ShardedDTensors(tensors, sharded[0])


def local(tensor: Tensor) -> Tensor:
    """This rank's part; a step count is no DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _row_ranges(shape: tuple[int, ...], ranks: int) -> list[tuple[int, int]]:
    """The elements that each rank holds: equal shares of the rows rounded up, the last ranks maybe less or none."""
    rows, row = shape[0], 1
    for n in shape[1:]:
        row *= n
    share = -(-rows // ranks)
    return [(min(r * share, rows) * row, min((r + 1) * share, rows) * row) for r in range(ranks)]
