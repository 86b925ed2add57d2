"""What the tensors in param groups are: engines put their own in place of those that a group was built with."""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mars_hf.optim.sharding.base import Sharding
from mars_hf.optim.sharding.local import LocalTensors


class GroupTensors:
    """The parameters that each group of an optimizer was built with, and what is known of those that it holds now.

    A memory of this process: no state_dict, copy or pickle holds it.

    Args:
        ranks: ranks that hold the same parameters and gradients, or None.
    """

    def __init__(self, ranks: dist.ProcessGroup | None = None) -> None:
        self._ranks = ranks
        # Weak, because FSDP2 frees the originals.
        self._originals: dict[int, list[weakref.ref[Tensor]]] = {}
        self._flat_layouts: dict[Tensor, Sharding] = {}

    def __len__(self) -> int:
        """Groups that were added; an engine may drop or hide some of them."""
        return len(self._originals)

    def add(self, params: Iterable[Tensor], ids_in_use: Iterable[int]) -> int:
        """Remembers the parameters of a new group.

        Args:
            params: held weakly.
            ids_in_use: of the groups that are there; a copy of an optimizer has groups that are not known here.

        Returns:
            The id of the group, to be kept in it.
        """
        group_id = 1 + max((*self._originals, *ids_in_use), default=-1)
        self._originals[group_id] = [weakref.ref(p) for p in params]
        return group_id

    def by_layout(
        self, group: dict[str, Any], params: list[Tensor], name_of: Callable[[Tensor], str]
    ) -> Iterator[tuple[list[Tensor], Sharding]]:
        """Splits parameters of a group by layout, device and dtype; see `layouts`."""
        return layouts(params, self._built_with(group), self._ranks, self._flat_layouts, name_of)

    def is_flat(self, p: Tensor) -> bool:
        """Whether p is a flat tensor of ZeRO."""
        return p in self._flat_layouts

    def holds_any(self, group: dict[str, Any], params: list[Tensor]) -> bool:
        """Whether any of these parameters is one that the group was built with."""
        built_with = {id(p) for p in self._built_with(group)}
        return any(id(p) in built_with for p in params)

    def _built_with(self, group: dict[str, Any]) -> list[Tensor]:
        """Those that are still alive."""
        known = self._originals.get(group["group_id"], ())
        return [p for p in (ref() for ref in known) if p is not None]


def layouts(
    params: list[Tensor],
    originals: list[Tensor],
    ranks: dist.ProcessGroup | None,
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
