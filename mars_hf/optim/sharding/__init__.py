"""What a rule may ask about a tensor that may be a shard, answered for each engine."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mars_hf.optim.sharding.base import Sharding, sum_over_ranks, whole_norms
from mars_hf.optim.sharding.local import LocalTensors

__all__ = ["LocalTensors", "Sharding", "layouts", "sum_over_ranks", "whole_norms", "whole_shape"]


def whole_shape(p: Any) -> tuple[int, ...]:
    """The shape of a parameter, also where DeepSpeed has taken its elements away (ZeRO-3, zero.Init)."""
    return tuple(getattr(p, "ds_shape", p.shape))


def layouts(
    params: list[Tensor],
    originals: list[Tensor],
    ranks: "dist.ProcessGroup | None",
    flat_layouts: dict[Tensor, Sharding],
    name_of: Callable[[Tensor], str],
) -> Iterator[tuple[list[Tensor], Sharding]]:
    """Splits the parameters of a group into lists that share layout, device and dtype.

    Args:
        params: what the param group holds now; engines replace what was put there.
        originals: the parameters that the group was built with, those of them that are still alive.
        ranks: ranks that hold the same parameters and gradients, or None.
        flat_layouts: what is known of the flat tensors of ZeRO, which is added to: their check takes time.
        name_of: how to call a parameter in an error.

    Yields:
        Parameters, in the order of `params`, and their layout.

    Raises:
        ValueError: a layout that is not served.
    """
    # A DTensor exists only where its module is loaded, and loading it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    built_with = {id(p) for p in originals}
    alike: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for p in params:
        key: tuple[Any, ...] = (p.device, p.dtype)
        if module is not None and isinstance(p, module.DTensor):
            key += (p.device_mesh, p.placements)
        elif p.ndim == 1 and id(p) not in built_with:
            if p not in flat_layouts:
                from mars_hf.optim.sharding.zero import zero_sharding

                found = zero_sharding(p, originals)
                if found is not None:
                    flat_layouts[p] = found
            if p in flat_layouts:
                yield [p], flat_layouts[p]
                continue
        alike[key].append(p)
    for key, same in alike.items():
        if len(key) > 2:
            from mars_hf.optim.sharding.dtensor import dtensor_sharding

            yield same, dtensor_sharding(same, name_of(same[0]))
        elif ranks is not None:
            from mars_hf.optim.sharding.replicated import ReplicatedTensors

            yield same, ReplicatedTensors(ranks)
        else:
            yield same, LocalTensors()
