"""DeepSpeed ZeRO: the optimizer is given one flat tensor, this rank's share of the parameters of a group.

What lies where is read from the engine's own objects, which the original parameters lead to:

- stages 1 and 2, and the bfloat16 optimizer: the parameters are views of the flat buffer of their group, so their
  storage offset tells; rank r holds the elements [r n, (r + 1) n) of the buffer, n being the size of its flat tensor.
- stage 3: rank r holds the elements [r k, (r + 1) k) of each parameter, k being its size by the number of ranks rounded
  up; the flat tensor is a row of these shares, in the order of the engine's sub-group.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_hf.optim.sharding.flat import FlatShards, Slices


class ZeroShards(FlatShards):
    """The parameters in a flat tensor of ZeRO.

    Args:
        tensors: the whole parameters.
        starts: where this rank's part of each begins in the flat tensor.
        group: the ranks.
    """

    def __init__(self, tensors: list[Slices], starts: list[int], group: dist.ProcessGroup) -> None:
        super().__init__(tensors, group)
        lengths = [stop - start for start, stop in (t.ranges[self._rank] for t in tensors)]
        self._stretches = [slice(start, start + length) for start, length in zip(starts, lengths)]

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Views of the one flat tensor; see `Sharding.parts`."""
        (flat,) = tensors
        # A step count is the same for all parts.
        return [flat[stretch] if flat.dim() else flat for stretch in self._stretches]


def zero_sharding(flat: Tensor, originals: list[Tensor]) -> ZeroShards | None:
    """The layout of a flat tensor, or None where no ZeRO engine made it.

    Args:
        flat: what the engine put into a param group.
        originals: the model's parameters that the param group was built with.

    Raises:
        ValueError: the engine lays its parameters out in a way that is not known here.
    """
    if any(hasattr(p, "_z3_optimizer") for p in originals):
        sharding, values = _stage_3(flat, originals)
    elif any(hasattr(p, "_dp_group") for p in originals):
        sharding, values = _stage_1_or_2(flat, [p for p in originals if hasattr(p, "_dp_group")])
    else:
        return None
    for part, value in zip(sharding.parts([flat.detach()]), values):
        if part.shape != value.shape or not torch.equal(part.to(value), value):
            raise ValueError(
                "params: the flat tensor of this DeepSpeed engine is laid out in a way that MARS does not know: use "
                "the DeepSpeed release that mars_hf was tested with, or FSDP2"
            )
    return sharding


def _stage_1_or_2(flat: Tensor, originals: list[Any]) -> tuple[ZeroShards, list[Tensor]]:
    """The layout, and what the model holds of each of this rank's parts."""
    group = originals[0]._dp_group
    rank, ranks, size = dist.get_rank(group), dist.get_world_size(group), flat.numel()
    tensors, starts, values = [], [], []
    for p in originals:
        offset = p.storage_offset()
        cuts = [min(max(r * size - offset, 0), p.numel()) for r in range(ranks + 1)]
        tensors.append(Slices(tuple(p.shape), list(pairwise(cuts))))
        starts.append(min(max(offset - rank * size, 0), size))
        values.append(p.detach().view(-1)[cuts[rank] : cuts[rank + 1]])
    return ZeroShards(tensors, starts, group), values


def _stage_3(flat: Tensor, originals: list[Any]) -> tuple[ZeroShards, list[Tensor]]:
    """The layout, and what the model holds of each of this rank's parts."""
    engine = next(p._z3_optimizer for p in originals if hasattr(p, "_z3_optimizer"))
    index = next((i for i, f in enumerate(engine.fp32_partitioned_groups_flat) if f is flat), None)
    if index is None:
        raise ValueError("params: this tensor is not among the flat tensors of its ZeRO-3 engine: let it step itself")
    group = engine.sub_group_process_groups[index]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tensors, starts, values, start = [], [], [], 0
    for p in engine.fp16_groups[index]:
        share = p.partition_numel()
        cuts = [min(r * share, p.ds_numel) for r in range(ranks + 1)]
        tensors.append(Slices(tuple(p.ds_shape), list(pairwise(cuts))))
        starts.append(start)
        values.append(p.ds_tensor.detach().view(-1)[: cuts[rank + 1] - cuts[rank]])
        start += share
    return ZeroShards(tensors, starts, group), values
