"""One update of the tensors of a param group: which passes run, over what pieces, in what order."""

from collections.abc import Iterator
from itertools import repeat
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
    alpha,
    clip_factors,
    corrected_gradients_,
    matrix_factor,
    momenta,
    norm,
    orthogonalised,
    scale_,
    squared_norms,
)
from mars_hf.optim.sharding import Sharding

# Bytes of parameters that go through all operations of a pass before the next ones do. On CPU a chunk and its gradient
# and state stay in cache between the operations; on accelerators a chunk only bounds the temporaries.
CPU_CHUNK_BYTES = 2**22
CHUNK_BYTES = 2**28


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
    params: Tensors, grads: Tensors, state: State, hyper: Hyper, sharding: Sharding, bounds: NormBounds
) -> None:
    """Applies the rule of a param group.

    Args:
        params: this rank's parts of tensors that share device and dtype; modified in place.
        grads: the same of their gradients; only read.
        state: for each of `state_names(hyper)` the same of the state; modified in place, except `step`, which counts
            this step already.
        hyper: the param group.
        sharding: answers for the parts.
        bounds: what is known of the norms from the last step; brought up to date.
    """
    reference = "last_grad" in state
    clips = reference and hyper["clip_c"] is not None
    # A bound on the norms would need a collective as the norms do, so tensors that are sharded are always measured.
    bounded = clips and sharding.whole
    may_clip = bounds.may_clip(grads, state["last_grad"], hyper) if bounded else [clips] * len(params)
    for clip in (False, True):
        where = [i for i, may in enumerate(may_clip) if may == clip]
        if where:
            part = {name: [tensors[i] for i in where] for name, tensors in state.items()}
            part_grads = [grads[i] for i in where]
            c_norms = _elementwise_([params[i] for i in where], part_grads, part, hyper, sharding, clip)
            if bounded and c_norms is not None and c_norms.device.type == "cpu":
                bounds.watch(part_grads, part["last_grad"], c_norms.tolist(), hyper)
    if bounded:
        bounds.remember()
    if hyper["rule"] in MATRIX_RULES:
        factors = [matrix_factor(shape, hyper) for shape in sharding.shapes(params)]
        for where in sharding.rounds(params):
            exp_avgs = {"exp_avg": [state["exp_avg"][i] for i in where]}
            matrices = momenta([grads[i] for i in where], exp_avgs, hyper)
            updates = sharding.on_whole_matrices(
                matrices, where, lambda whole: orthogonalised(whole, hyper), hyper["ns_dtype"]
            )
            updates = [u.to(m.dtype) for u, m in zip(updates, matrices)]
            torch._foreach_mul_(updates, [factors[i] for i in where])
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
