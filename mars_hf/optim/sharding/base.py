"""The only questions a rule may ask about tensors that may be shards, and how work on whole matrices is divided."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Maps whole matrices of one shape to new tensors of the same shape.
MatrixFunction = Callable[[list[Tensor]], list[Tensor]]

# Matrices are orthogonalised together up to this many elements on a rank, which bounds the temporaries.
STACK_ELEMENTS = 2**24


class Round(NamedTuple):
    """Matrices whose work is done together: their indices, and for each the rank that works on it."""

    where: list[int]
    owners: list[int]


class Sharding(Protocol):
    """How a list of tensors (parameters, or gradients, or state of one kind) is laid out over the ranks.

    A rule sees only this rank's parts, one for each whole tensor; a part may be empty. Every rank must ask the same
    questions in the same order, because answers may need communication.
    """

    whole: bool
    """Whether each part is the whole tensor on every rank."""

    group: dist.ProcessGroup | None
    """The ranks that hold the parts, where they are not whole."""

    ranks: int
    """Among how many ranks the work on whole matrices is divided."""

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's part of each whole tensor, as views; a number of the engine's tensor goes to each of its parts.

        Args:
            tensors: the engine's tensors: parameters, gradients or state.
        """
        ...

    def shapes(self, parts: list[Tensor]) -> list[tuple[int, ...]]:
        """The shapes of the whole tensors.

        Args:
            parts: this rank's parts of them.
        """
        ...

    def on_whole_matrices(
        self, parts: list[Tensor], work: "Round", fn: MatrixFunction, dtype: torch.dtype
    ) -> list[Tensor]:
        """Applies a function of whole matrices and returns this rank's part of each result.

        Args:
            parts: this rank's parts of the matrices of one round; only read.
            work: the round, of those that `divide` made of all matrices for `ranks`.
            fn: maps whole matrices of one shape to new tensors of that shape.
            dtype: of the results of `fn`; they travel between ranks in it.

        Returns:
            This rank's part of each result, in the order and shapes of `parts`.
        """
        ...


def sum_over_ranks(shardings: Sequence[Sharding], values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Adds up what each rank knows of its parts, by one collective for each group of ranks.

    Args:
        shardings: layouts of lists of tensors.
        values: for each layout a vector, float32 or float64, or None; not modified.

    Returns:
        For each layout the sums over the ranks that hold parts of its tensors, or None.
    """
    results = list(values)
    by_group: defaultdict[dist.ProcessGroup, dict[int, Tensor]] = defaultdict(dict)
    for i, (sharding, value) in enumerate(zip(shardings, values)):
        if value is not None and sharding.group is not None:
            by_group[sharding.group][i] = value.double()
    for group, parts in by_group.items():
        own = torch.cat(list(parts.values()))
        total = own.to(communication_device(group, own.device))
        dist.all_reduce(total, group=group)
        for i, value in zip(parts, total.to(own.device).split([len(part) for part in parts.values()])):
            results[i] = value
    return results


def whole_norms(shardings: Sequence[Sharding], squares: Sequence[Tensor | None]) -> list[Tensor | None]:
    """L2 norms of whole tensors, whatever part of them this rank holds; see `sum_over_ranks`.

    Args:
        shardings: layouts of lists of tensors.
        squares: for each layout the squared norms of this rank's parts, shape (tensors,), or None.
    """
    return [None if square is None else square.sqrt() for square in sum_over_ranks(shardings, squares)]


def communication_device(group: dist.ProcessGroup | None, own: torch.device) -> torch.device:
    """`own`, if the ranks can send tensors that are there, else the accelerator of this rank.

    An engine that offloads the optimizer to CPUs keeps its process groups for accelerators alone (NCCL).

    Args:
        group: the ranks.
        own: where the tensors are.
    """
    served = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return own if own.type in served else torch.device(served[0], torch.accelerator.current_device_index())


def divide(shapes: Sequence[Sequence[int]], ranks: int) -> list[Round]:
    """Divides matrices among ranks, so that each one is worked on once and the ranks finish together.

    The costliest matrix left goes to the rank with the least work, Newton-Schulz taking rows cols min(rows, cols)
    operations a step; in a round a rank takes matrices of up to STACK_ELEMENTS elements. The outcome depends on the
    arguments alone, so that all ranks agree without a word.

    Args:
        shapes: of the whole matrices; a tensor with ndim > 2 counts as (first dimension, all others).
        ranks: number of ranks.

    Returns:
        The rounds, in which each matrix stands once.
    """
    sizes = [prod(shape) for shape in shapes]
    costs = [size * min(shape[0], size // max(1, shape[0])) for shape, size in zip(shapes, sizes)]
    # Equal shapes side by side: a rank stacks those of its round.
    order = sorted(range(len(shapes)), key=lambda i: (-costs[i], tuple(shapes[i]), i))
    work = [0] * ranks
    filled = [(0, 0)] * ranks  # the round each rank is in, and the elements it has taken there
    rounds: list[Round] = []
    for i in order:
        owner = min(range(ranks), key=lambda r: (work[r], r))
        work[owner] += costs[i]
        number, elements = filled[owner]
        if elements and elements + sizes[i] > STACK_ELEMENTS:
            number, elements = number + 1, 0
        filled[owner] = number, elements + sizes[i]
        if number == len(rounds):
            rounds.append(Round([], []))
        rounds[number].where.append(i)
        rounds[number].owners.append(owner)
    return rounds


def by_shape(matrices: list[Tensor], fn: MatrixFunction) -> list[Tensor]:
    """Applies `fn` to whole matrices, those of equal shape together.

    Args:
        matrices: whole matrices; only read.
        fn: see `Sharding.on_whole_matrices`.
    """
    equal: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        equal[tuple(matrix.shape)].append(i)
    results = list(matrices)
    for where in equal.values():
        for i, result in zip(where, fn([matrices[i] for i in where])):
            results[i] = result
    return results
