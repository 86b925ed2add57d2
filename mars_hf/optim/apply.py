"""One update of the tensors of a param group: which passes run, over what pieces, in what order."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mars_hf.optim.rules import (
    ELEMENTWISE,
    MATRIX_RULES,
    Hyper,
    State,
    Tensors,
    add_updates_,
    clip_factors,
    corrected_gradients_,
    momenta,
    orthogonal_updates,
    scale_,
    squared_norms,
)
from mars_hf.optim.sharding import Sharding

# Bytes of parameters that go through all operations of a pass before the next ones do. On CPU a chunk and its gradient
# and state stay in cache between the operations; on accelerators a chunk only bounds the temporaries.
CPU_CHUNK_BYTES = 2**22
CHUNK_BYTES = 2**28

# Matrices of one shape are orthogonalised together, up to this many elements, which bounds the temporaries.
STACK_ELEMENTS = 2**24


class Chunk(NamedTuple):
    """Flat pieces of tensors, or whole small tensors, with their gradients and state."""

    params: Tensors
    grads: Tensors
    state: State
    owners: list[int]  # for each piece, the index of the tensor that it belongs to


@torch.no_grad()
def update_(params: Tensors, grads: Tensors, state: State, hyper: Hyper, sharding: Sharding) -> None:
    """Applies the rule of a param group.

    Args:
        params: tensors that share device and dtype; modified in place.
        grads: their gradients, same shapes; only read.
        state: for each of `state_names(hyper)` the list of tensors; modified in place.
        hyper: the param group.
        sharding: answers for tensors that are shards.
    """
    pieces = list(chunks(params, grads, state))
    reference = "last_grad" in state
    clipped = reference and hyper["clip_c"] is not None
    if clipped:
        factors = clip_factors(sharding.whole_norms(_squared_norms_of_c_(pieces, len(params), hyper)), hyper["clip_c"])
    for chunk in pieces:
        cs = chunk.grads
        if reference:
            cs = last_grads = chunk.state["last_grad"]
            if not clipped or cs[0].dtype != chunk.grads[0].dtype:
                cs = corrected_gradients_(chunk.grads, last_grads, hyper)
            if clipped:
                scale_(cs, [factors[owner] for owner in chunk.owners])
        ELEMENTWISE[hyper["rule"]](chunk.params, chunk.grads, cs, chunk.state, hyper)
        if reference and hyper["is_approx"]:
            # A copy into the optimizer's own memory: engines write the next gradient over the memory of this one.
            torch._foreach_copy_(last_grads, chunk.grads)
    if hyper["rule"] in MATRIX_RULES:
        for where in _equal_shapes(params):
            exp_avgs = {"exp_avg": [state["exp_avg"][i] for i in where]}
            matrices = momenta([grads[i] for i in where], exp_avgs, hyper)
            updates = sharding.on_whole_matrices(matrices, lambda whole: orthogonal_updates(whole, hyper))
            add_updates_([params[i] for i in where], updates, hyper)


def _squared_norms_of_c_(pieces: list[Chunk], count: int, hyper: Hyper) -> Tensor:
    """||c||^2 of this rank's part of each tensor, shape (count,); h becomes c where its dtype allows."""
    parts: list[Tensors] = [[] for _ in range(count)]
    for chunk in pieces:
        cs = corrected_gradients_(chunk.grads, chunk.state["last_grad"], hyper)
        for owner, square in zip(chunk.owners, squared_norms(cs)):
            parts[owner].append(square)
    return torch.stack([part[0] if len(part) == 1 else torch.stack(part).sum() for part in parts])


def chunks(params: Tensors, grads: Tensors, state: State) -> Iterator[Chunk]:
    """Cuts tensors into chunks of bounded size; see `update_` for the arguments.

    Small tensors share a chunk; a tensor larger than a chunk is cut into flat views, if it and all its companions are
    contiguous.
    """
    limit = CPU_CHUNK_BYTES if params[0].device.type == "cpu" else CHUNK_BYTES
    limit //= params[0].element_size()
    chunk, size = _empty_chunk(state), 0
    for i, tensors in enumerate(zip(params, grads, *state.values())):
        numel = tensors[0].numel()
        if numel > limit and all(t.is_contiguous() for t in tensors):
            pieces = list(zip(*(_cut(t, limit, numel) for t in tensors)))
        else:
            pieces = [tensors]
        for piece in pieces:
            if chunk.owners and size + piece[0].numel() > limit:
                yield chunk
                chunk, size = _empty_chunk(state), 0
            chunk.params.append(piece[0])
            chunk.grads.append(piece[1])
            for name, tensor in zip(state, piece[2:]):
                chunk.state[name].append(tensor)
            chunk.owners.append(i)
            size += piece[0].numel()
    if chunk.owners:
        yield chunk


def _cut(t: Tensor, limit: int, numel: int) -> Sequence[Tensor]:
    """Flat views of at most `limit` elements; of a step count copies, and itself at last, so that it advances once."""
    if t.dim() > 0:
        return t.view(-1).split(limit)
    return [t.clone() for _ in range((numel - 1) // limit)] + [t]


def _empty_chunk(state: State) -> Chunk:
    return Chunk([], [], {name: [] for name in state}, [])


def _equal_shapes(params: Tensors) -> Iterator[list[int]]:
    """Indices of tensors of one shape, in batches of at most STACK_ELEMENTS."""
    by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        by_shape[p.shape].append(i)
    for shape, where in by_shape.items():
        batch = max(1, STACK_ELEMENTS // max(1, shape.numel()))
        for start in range(0, len(where), batch):
            yield where[start : start + batch]
