"""One update of the tensors of a param group: which passes run, over what pieces, in what order."""

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from mars_hf.optim.fused import squared_norms_of_c
from mars_hf.optim.fused import update_ as fused_update_
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
    matrix_factor,
    momenta,
    norm,
    orthogonalised,
    scale_,
    squared_norms,
)
from mars_hf.optim.sharding import Round, Sharding, divide

# Bytes of parameters that go through all operations of a pass before the next ones do. On CPU a chunk and its gradient
# and state stay in cache between the operations; on accelerators a chunk only bounds the temporaries.
CPU_CHUNK_BYTES = 2**22
CHUNK_BYTES = 2**28


class Part(NamedTuple):
    """Some of the tensors of an update."""

    params: Tensors
    grads: Tensors
    state: State

    def where(self, flags: list[bool], value: bool) -> "Part":
        """The tensors whose flag is `value`."""
        params, grads, *states = (
            [t for t, flag in zip(tensors, flags) if flag == value]
            for tensors in (self.params, self.grads, *self.state.values())
        )
        return Part(params, grads, dict(zip(self.state, states)))


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

    def watched(self, grads: Tensors, last_grads: Tensors, hyper: Hyper) -> dict[Tensor, float]:
        """The tensors whose ||c|| cannot exceed clip_c, by their h, with ||g||.

        Args:
            grads: g of each tensor.
            last_grads: their h.
            hyper: the param group.
        """
        of_h = alpha(hyper)
        limit = 0.999 * hyper["clip_c"]  # covers the rounding of the norms
        norms = {}
        for g, h in zip(grads, last_grads):
            version, h_norm = self._known.pop(h, (-1, 0.0))
            if version == h._version:
                g_norm = norm(g)
                if (1 + of_h) * g_norm + of_h * h_norm <= limit:
                    norms[h] = g_norm
        return norms

    def to_watch(self, grads: Tensors, last_grads: Tensors, c_norms: Tensor, hyper: Hyper) -> dict[Tensor, float]:
        """Of the tensors that were measured, those to watch from now on, by their h, with ||g||.

        Args:
            grads: their g.
            last_grads: their h.
            c_norms: their ||c||, before the clip.
            hyper: the param group.
        """
        becomes_g = hyper["is_approx"] and last_grads[0].dtype == grads[0].dtype  # in another dtype it is rounded
        if c_norms.device.type != "cpu" or not becomes_g:
            return {}
        small = zip(grads, last_grads, c_norms.tolist())
        return {h: norm(g) for g, h, c_norm in small if c_norm <= 0.5 * hyper["clip_c"]}

    def remember(self, norms: dict[Tensor, float]) -> None:
        """Notes that each h now holds its g, whose norm is given."""
        self._known.update({h: (h._version, h_norm) for h, h_norm in norms.items()})


class Update:
    """One update of the tensors of a param group that share a layout: `squares()`, then `finish()` with the norms.

    In between the squares of all updates of a step are added up over the ranks at once.

    Args:
        params: this rank's parts of tensors that share device and dtype; modified in place.
        grads: the same of their gradients; only read.
        state: for each of `state_names(hyper)` the same of the state; modified in place, except `step`, which counts
            this step already.
        hyper: the param group.
        sharding: answers for the parts.
        bounds: what is known of the norms from the last step; brought up to date.
        fuse: runs the element-wise part of a MARS rule as one compiled pass; the group went through `check_fused`.
    """

    def __init__(
        self,
        params: Tensors,
        grads: Tensors,
        state: State,
        hyper: Hyper,
        sharding: Sharding,
        bounds: NormBounds,
        fuse: bool = False,
    ) -> None:
        self.all = Part(params, grads, state)
        self.hyper, self.sharding, self._bounds = hyper, sharding, bounds
        self._fuse = fuse and hyper["rule"] in MARS_RULES
        clips = "last_grad" in state and hyper["clip_c"] is not None
        # The compiled pass measures whole tensors by itself, faster than their ||g||. Sharded ones are always measured:
        # a bound on their norms would need a collective as the norms do.
        self._clips_within = self._fuse and sharding.whole
        self._bounded = clips and sharding.whole and not self._fuse
        self._g_norms: dict[Tensor, float] = {}  # by the h that will be g, to be remembered
        may_clip = [clips] * len(params)
        if self._bounded:
            last_grads = state["last_grad"]
            self._g_norms = bounds.watched(grads, last_grads, hyper)
            may_clip = [h not in self._g_norms for h in last_grads]
        self._clipped, self._others = (self.all.where(may_clip, value) for value in (True, False))

    def squares(self) -> Tensor | None:
        """||c||^2 of this rank's part of each tensor that may be clipped; None: nobody asks. h may become c."""
        part, hyper = self._clipped, self.hyper
        if not part.params or self._clips_within:
            return None
        if self._fuse:
            return squared_norms_of_c(part.grads, part.state["last_grad"], hyper)
        self._pieces = list(chunks(part))
        squares: list[Tensors] = [[] for _ in part.params]
        for chunk in self._pieces:
            cs = corrected_gradients_(chunk.grads, chunk.state["last_grad"], hyper)
            for owner, square in zip(chunk.owners, squared_norms(cs)):
                squares[owner].append(square)
        return torch.stack([part[0] if len(part) == 1 else torch.stack(part).sum() for part in squares])

    def finish(self, norms: Tensor | None) -> None:
        """Applies the rule.

        Args:
            norms: ||c|| of the whole tensors of `squares()`.
        """
        if self._others.params:
            self._elementwise_(self._others, None)
        if self._clips_within and self._clipped.params:
            self._elementwise_(self._clipped, None)
        elif norms is not None:
            self._elementwise_(self._clipped, clip_factors(norms, self.hyper["clip_c"]))
            if self._bounded:
                grads, last_grads = self._clipped.grads, self._clipped.state["last_grad"]
                self._g_norms |= self._bounds.to_watch(grads, last_grads, norms, self.hyper)
        self._bounds.remember(self._g_norms)
        if self.hyper["rule"] in MATRIX_RULES:
            self._orthogonalise_()

    def _elementwise_(self, part: "Part", factors: Factors | None) -> None:
        """What a rule does element by element: c, its clip, and the update or, for matrix rules, the momentum."""
        hyper = self.hyper
        if self._fuse:
            clips = self._clips_within and part is self._clipped
            fused_update_(*part, hyper, factors=factors, clips=clips)
            return
        # Where there are factors, h became c already if its dtype allows.
        for chunk in chunks(part) if factors is None else self._pieces:
            cs = chunk.grads
            if "last_grad" in part.state:
                cs = last_grads = chunk.state["last_grad"]
                if factors is None or cs[0].dtype != chunk.grads[0].dtype:
                    cs = corrected_gradients_(chunk.grads, last_grads, hyper)
                if factors is not None:
                    scale_(cs, [factors[owner] for owner in chunk.owners])
            ELEMENTWISE[hyper["rule"]](chunk.params, chunk.grads, cs, chunk.state, hyper)
            if "last_grad" in part.state and hyper["is_approx"]:
                # A copy into the optimizer's own memory: engines write the next gradient over the memory of this one.
                torch._foreach_copy_(last_grads, chunk.grads)

    def _orthogonalise_(self) -> None:
        """What a matrix rule does with the momentum."""
        for work in divide(self.sharding.shapes(self.all.params), self.sharding.ranks):
            self._orthogonalise_round_(work)

    def _orthogonalise_round_(self, work: Round) -> None:
        """One round; a method, so that nothing of it is kept while the next one works."""
        (params, grads, state), hyper, sharding, where = self.all, self.hyper, self.sharding, work.where
        shapes = sharding.shapes(params)
        exp_avgs = {"exp_avg": [state["exp_avg"][i] for i in where]}
        matrices = momenta([grads[i] for i in where], exp_avgs, hyper)
        updates = sharding.on_whole_matrices(
            matrices, work, lambda whole: orthogonalised(whole, hyper), hyper["ns_dtype"]
        )
        add_updates_([params[i] for i in where], updates, hyper, [matrix_factor(shapes[i], hyper) for i in where])


def chunks(part: Part) -> Iterator[Chunk]:
    """Cuts tensors into chunks of bounded size.

    Small tensors share a chunk; a tensor larger than a chunk is cut into flat views, if it and all its companions are
    contiguous.
    """
    params, grads, state = part
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
