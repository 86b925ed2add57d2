"""The only two questions a rule may ask about tensors that may be shards."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Sharding(Protocol):
    """How the tensors of one parameter group are laid out over the ranks."""

    def whole_norms(self, squares: Tensor) -> Tensor:
        """L2 norm of each whole tensor, whatever part of it this rank holds.

        Args:
            squares: squared norm of this rank's part of each tensor, shape (tensors,), float32 or float64; not
                modified. Squares, because they add up over the ranks, and one vector of them takes one collective.

        Returns:
            Norms, shape (tensors,), on the same device.
        """
        ...

    def on_whole_matrices(self, tensors: list[Tensor], fn: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Applies a function of whole matrices and returns this rank's part of each result.

        Args:
            tensors: this rank's parts of the matrices.
            fn: maps whole matrices to new tensors of the same shapes.

        Returns:
            This rank's part of each result, in the order and shapes of `tensors`.
        """
        ...
