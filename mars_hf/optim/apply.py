"""One update of the tensors of a param group: which passes run, over what pieces, in what order."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from mars_hf.optim import fused
from mars_hf.optim.rules import (
    ELEMENTWISE,
    MARS_RULES,
    MATRIX_RULES,
    Factors,
    Hyper,
    State,
    Tensors,
    add_updates_,
    alpha,
    clip_factors,
    corrected_gradients_,
    momenta,
    norm,
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


class NormBounds:
    """Tells on CPU which tensors cannot be clipped, which saves them the pass that measures ||c||.

    ||c|| <= (1 + alpha) ||g|| + alpha ||h||, and in approx mode h is the g of the step before. A tensor is watched in
    this way once its ||c|| was found small, and until the bound exceeds clip_c. On accelerators reading a norm would
    synchronise the host; there every tensor may be clipped.
    """

    def __init__(self) -> None:
        # h -> (version of h when it was stored, ||h||): a later write to h by anyone else makes the norm unknown.
        self._known: dict[Tensor, tuple[int, float]] = {}

    def may_clip(self, grads: Tensors, last_grads: Tensors, hyper: Hyper) -> list[bool]:
        """Whether ||c|| may exceed clip_c, for each tensor; see `update_` for the arguments."""
        of_h = alpha(hyper)
        limit = 0.999 * hyper["clip_c"]  # covers the rounding of the norms
        self._norms: dict[Tensor, float] = {}
        answers = []
        for g, h in zip(grads, last_grads):
            version, h_norm = self._known.pop(h, (-1, 0.0))
            watched = version == h._version
            if watched:
                g_norm = norm(g)
                watched = (1 + of_h) * g_norm + of_h * h_norm <= limit
            if watched:
                self._norms[h] = g_norm
            answers.append(not watched)
        return answers

    def watch(self, grads: Tensors, last_grads: Tensors, c_norms: list[float], hyper: Hyper) -> None:
        """Begins to watch the tensors whose measured ||c|| is small.

        Args:
            grads: g of tensors that went through the measuring pass.
            last_grads: their h.
            c_norms: their ||c||, before the clip.
            hyper: the param group.
        """
        # Only where ||h|| will be that of g: h in another dtype is rounded.
        if hyper["is_approx"] and last_grads[0].dtype == grads[0].dtype:
            for g, h, c_norm in zip(grads, last_grads, c_norms):
                if c_norm <= 0.5 * hyper["clip_c"]:
                    self._norms[h] = norm(g)

    def remember(self) -> None:
        """Notes that the h of each watched tensor now holds its g."""
        self._known.update({h: (h._version, h_norm) for h, h_norm in self._norms.items()})


@torch.no_grad()
def update_(
    params: Tensors,
    grads: Tensors,
    state: State,
    hyper: Hyper,
    sharding: Sharding,
    bounds: NormBounds,
    fuse: bool = False,
) -> None:
    """Applies the rule of a param group.

    Args:
        params: tensors that share device and dtype; modified in place.
        grads: their gradients, same shapes; only read.
        state: for each of `state_names(hyper)` the list of tensors; modified in place.
        hyper: the param group.
        sharding: answers for tensors that are shards.
        bounds: what is known of the norms from the last step; brought up to date.
        fuse: runs the element-wise part of a MARS rule as one compiled pass; the group went through `check_fused`.
    """
    elementwise_ = _fused_elementwise_ if fuse and hyper["rule"] in MARS_RULES else _elementwise_
    if "step" in state:
        torch._foreach_add_(state["step"], 1)
    reference = "last_grad" in state
    clips = reference and hyper["clip_c"] is not None
    may_clip = bounds.may_clip(grads, state["last_grad"], hyper) if clips else [False] * len(params)
    for clip in (False, True):
        where = [i for i, may in enumerate(may_clip) if may == clip]
        if where:
            part = {name: [tensors[i] for i in where] for name, tensors in state.items()}
            part_grads = [grads[i] for i in where]
            c_norms = elementwise_([params[i] for i in where], part_grads, part, hyper, sharding, clip)
            if c_norms is not None and c_norms.device.type == "cpu":
                bounds.watch(part_grads, part["last_grad"], c_norms.tolist(), hyper)
    if clips:
        bounds.remember()
    if hyper["rule"] in MATRIX_RULES:
        for where in _equal_shapes(params):
            exp_avgs = {"exp_avg": [state["exp_avg"][i] for i in where]}
            matrices = momenta([grads[i] for i in where], exp_avgs, hyper)
            updates = sharding.on_whole_matrices(matrices, lambda whole: orthogonal_updates(whole, hyper))
            add_updates_([params[i] for i in where], updates, hyper)


def _elementwise_(
    params: Tensors, grads: Tensors, state: State, hyper: Hyper, sharding: Sharding, clip: bool
) -> Tensor | None:
    """What a rule does element by element: c, its clip, and the update or, for matrix rules, the momentum.

    Returns:
        With `clip` ||c|| of each tensor, before the clip.
    """
    pieces = list(chunks(params, grads, state))
    norms = None
    if clip:
        norms = sharding.whole_norms(_squared_norms_of_c_(pieces, len(params), hyper))
        factors = clip_factors(norms, hyper["clip_c"])
    for chunk in pieces:
        cs = chunk.grads
        if "last_grad" in state:
            cs = last_grads = chunk.state["last_grad"]
            if not clip or cs[0].dtype != chunk.grads[0].dtype:
                cs = corrected_gradients_(chunk.grads, last_grads, hyper)
            if clip:
                scale_(cs, [factors[owner] for owner in chunk.owners])
        ELEMENTWISE[hyper["rule"]](chunk.params, chunk.grads, cs, chunk.state, hyper)
        if "last_grad" in state and hyper["is_approx"]:
            # A copy into the optimizer's own memory: engines write the next gradient over the memory of this one.
            torch._foreach_copy_(last_grads, chunk.grads)
    return norms


def _fused_elementwise_(
    params: Tensors, grads: Tensors, state: State, hyper: Hyper, sharding: Sharding, clip: bool
) -> Tensor | None:
    """As `_elementwise_`; one pass over memory needs no chunks that stay in cache, and the norms are another one."""
    norms = None
    factors: Factors = [1.0] * len(params)
    if clip:
        norms = sharding.whole_norms(fused.squared_norms_of_c(grads, state["last_grad"], hyper))
        factors = clip_factors(norms, hyper["clip_c"])
    fused.update_(params, grads, state, hyper, factors)
    return norms


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
            pieces = list(zip(*(t.view(-1).split(limit) if t.dim() else repeat(t) for t in tensors)))
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
