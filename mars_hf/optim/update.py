"""One update of tensors of a param group: c is measured, all ranks agree on its clip, the rule is applied."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars_hf.optim.chunks import Function, in_lists, in_pieces, select
from mars_hf.optim.hyper import Hyper
from mars_hf.optim.newton_schulz import orthogonalised, rows_and_cols
from mars_hf.optim.rules import RULES, Numbers, Tensors, squared_norms, squared_norms_of_c
from mars_hf.optim.sharding import GroupTensors, Sharding, divide, whole_norms


class Path(NamedTuple):
    """How functions of rules.py are applied; each returns what the function returns for each tensor."""

    pieces: Callable[[Function, Tensors, Numbers], list[Tensor]]  # element by element, or to sums over elements
    wholes: Callable[[Function, Tensors, Numbers], list[Tensor]]  # where the results are whole tensors


EAGER = Path(in_pieces, in_lists)


class Update(NamedTuple):
    """The coming update of tensors of one param group that share a layout, device and dtype.

    Args:
        x: this rank's parts of them, each with its gradient and state.
        numbers: of the group in this step.
        hyper: the group's.
        sharding: answers for the parts.
        path: how the rule is applied.
    """

    x: Tensors
    numbers: Numbers
    hyper: Hyper
    sharding: Sharding
    path: Path


def clipped_updates(updates: Sequence[Update]) -> list[Update]:
    """The updates with 1 / max(1, ||c|| / clip_c) of each whole tensor, where c is clipped.

    The norms of all updates are added up over the ranks at once. The factors are numbers on CPU; on accelerators
    tensors, which need no host sync.
    """
    squares = [
        torch.stack(u.path.pieces(squared_norms_of_c, u.x, u.numbers))
        if u.x.last_grad and u.hyper.clip_c is not None
        else None
        for u in updates
    ]
    results = []
    for update, norms in zip(updates, whole_norms([u.sharding for u in updates], squares)):
        clip_c = update.hyper.clip_c
        if norms is not None and clip_c is not None:
            clip = torch.clamp(clip_c / norms, max=1.0)
            factors: list[Any] = clip.tolist() if clip.device.type == "cpu" else list(clip.unbind())
            x = update.x._replace(clip=factors)
            same = x.last_grad[0].dtype == x.grads[0].dtype
            update = update._replace(x=x._replace(c=x.last_grad) if same else x)
        results.append(update)
    return results


def apply_(update: Update) -> None:
    """Applies the rule to the parameters and their state, in place."""
    x, hyper, sharding, rule = update.x, update.hyper, update.sharding, RULES[update.hyper.rule]
    if rule.scale is None:
        update.path.pieces(rule.update, x, update.numbers)
        return
    shapes = sharding.shapes(x.params)
    function = partial(orthogonalised, hyper=hyper, eps=rule.ns_eps(hyper))
    for work in divide(shapes, sharding.ranks):
        some = select(x, work.where)
        matrices = update.path.wholes(rule.update, some, update.numbers)
        directions = sharding.on_whole_matrices(matrices, work, function, hyper.ns_dtype)
        del matrices
        torch._foreach_mul_(some.params, update.numbers.decay)
        for p, direction, i in zip(some.params, directions, work.where):
            p.add_(direction, alpha=-hyper.lr * rule.scale(*rows_and_cols(shapes[i], hyper)))
        del directions  # nothing of a round is kept while the next one works


def is_dry_run(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], sharding: Sharding, memory: GroupTensors
) -> bool:
    """Whether the caller only wants to see the state: a first step with gradients all zero that cannot be real.

    torch.distributed.checkpoint steps once like this, with lr 0, and DeepSpeed's stage 0 in bfloat16 before training,
    with the real lr and whole tensors of its own in place of ours. The flat tensors of ZeRO are stepped in training
    alone, and one of them may well have no gradient but zeros at first, say the A matrices of LoRA.
    """
    if memory.is_flat(params[0]):
        return False
    if group["lr"] != 0 and (not sharding.whole or memory.holds_any(group, params)):
        return False
    (norms,) = whole_norms([sharding], [torch.stack(squared_norms(grads))])
    return norms is not None and not norms.any()
