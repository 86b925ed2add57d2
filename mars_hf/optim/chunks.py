"""Tensors in lists of bounded size, so that all operations of a rule run over one before they run over the next."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.rules import Numbers, Tensors

# On CPU a list, with gradients and state, stays in cache between the operations; on accelerators it only bounds the
# temporaries.
CPU_CHUNK_BYTES = 2**22
CHUNK_BYTES = 2**28

Function = Callable[[Tensors, Numbers], Any]  # one of rules.py
Row = tuple[Any, ...]


def in_lists(function: Function, x: Tensors, n: Numbers) -> list[Tensor]:
    """Applies a function of rules.py to whole tensors; returns what it returns for each of them."""
    return [result for some in _lists(_rows(x), _limit(x)) for result in function(some, n) or ()]


def in_pieces(function: Function, x: Tensors, n: Numbers) -> list[Tensor]:
    """The same to flat pieces of large tensors; what it returns for the pieces of one tensor is added up."""
    limit = _limit(x)
    pieces = [list(_pieces(row, limit)) for row in _rows(x)]
    results = iter([result for some in _lists(chain(*pieces), limit) for result in function(some, n) or ()])
    sums = [[result for _, result in zip(of_one, results)] for of_one in pieces]
    return [parts[0] if len(parts) == 1 else torch.stack(parts).sum() for parts in sums if parts]


def select(x: Tensors, where: list[int]) -> Tensors:
    """Those at the given places."""
    return Tensors(*([tensors[i] for i in where] if tensors else [] for tensors in x))


def _limit(x: Tensors) -> int:
    """Elements of a list."""
    first = x.params[0]
    return (CPU_CHUNK_BYTES if first.device.type == "cpu" else CHUNK_BYTES) // first.element_size()


def _rows(x: Tensors) -> Iterator[Row]:
    """Each tensor with its companions; None for those that a rule has not."""
    return zip(*(tensors or repeat(None) for tensors in x))


def _pieces(row: Row, limit: int) -> Iterable[Row]:
    """Cuts what is larger than a list, and contiguous, into flat views; a number belongs to every piece."""
    if row[0].numel() <= limit:
        return [row]
    cuts = [isinstance(t, Tensor) and t.dim() > 0 for t in row]
    if not all(t.is_contiguous() for t, cut in zip(row, cuts) if cut):
        return [row]
    return zip(*(t.view(-1).split(limit) if cut else repeat(t) for t, cut in zip(row, cuts)))


def _lists(rows: Iterable[Row], limit: int) -> Iterator[Tensors]:
    some: list[Row] = []
    size = 0
    for row in rows:
        if some and size + row[0].numel() > limit:
            yield _together(some)
            some, size = [], 0
        some.append(row)
        size += row[0].numel()
    yield _together(some)


def _together(rows: list[Row]) -> Tensors:
    return Tensors(*([] if column[0] is None else list(column) for column in zip(*rows)))
