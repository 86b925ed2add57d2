"""Ordinary tensors: one process, and DDP, where every rank holds every parameter whole."""

from collections.abc import Callable

from torch import Tensor


class LocalTensors:
    """Each tensor is whole on this rank, so nothing is communicated."""

    def whole_norms(self, squares: Tensor) -> Tensor:
        """Square roots; see `Sharding.whole_norms`."""
        return squares.sqrt()

    def on_whole_matrices(self, tensors: list[Tensor], fn: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """The function itself; see `Sharding.on_whole_matrices`."""
        return fn(tensors)
