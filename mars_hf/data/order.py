"""The order of training as a function: which block comes i-th, by arithmetic, without a list of them.

Sample i of a run is block `permutation(i % n)` of pass `i // n` over n blocks, with a new permutation each pass. So the
order depends on the seed alone: a step takes the same blocks on any number of processes and accumulation steps of the
same global batch, batches across the end of a pass are full, and a resumed run computes where it is.
"""

from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np
from torch.utils.data import Dataset

# Each round moves one coordinate by a function of the other.
ROUNDS = 6
_MASK = 2**64 - 1


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """The image of `index` under a pseudo-random permutation of range(size).

    A Feistel network on the smallest near-square a x b that holds `size`: index = (left, right), and in turn
    left += f(right) mod a, right += f(left) mod b, each of which can be undone. An image outside of range(size) is
    permuted again until it is inside (cycle walking).

    Args:
        index: in range(size).
        size: of the permuted range.
        seed: of the run, not negative.
        epoch: each has a permutation of its own.
    """
    a = isqrt(size - 1) + 1 if size > 1 else 1
    b = -(-size // a)
    keys = _keys(seed, epoch)
    while True:
        left, right = divmod(index, b)
        for even, odd in keys:
            left = (left + _mix(right ^ even)) % a
            right = (right + _mix(left ^ odd)) % b
        index = left * b + right
        if index < size:
            return index


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
    words = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64).tolist()
    return tuple(zip(words[::2], words[1::2]))


def _mix(x: int) -> int:
    """64 bits, each of which depends on all bits of x."""
    x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    return x ^ (x >> 32)


class Shuffled(Dataset):
    """A whole training run over a map-style dataset, in order: train on it with `train_sampling_strategy="sequential"`.

    For the Trainer the run is then a single epoch: `state.epoch` is the share of the run that is done. Resuming skips
    indices, not blocks: nothing that was trained on is read again.

    Args:
        blocks: a map-style dataset.
        samples: length of the run, in blocks: steps x global batch. The order does not depend on it.
        seed: of the order.
    """

    def __init__(self, blocks: Any, samples: int, seed: int) -> None:
        self.blocks, self.samples, self.seed = blocks, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        epoch, position = divmod(index, len(self.blocks))
        return self.blocks[permuted(position, len(self.blocks), self.seed, epoch)]
