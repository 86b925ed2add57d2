"""Orthogonalisation of matrices by Newton-Schulz iteration."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from mars_hf.optim.hyper import Hyper

# A quintic step maps each singular value s of X to A s + B s^3 + C s^5; five of them push (0, 1] into about [0.7, 1.2].
A, B, C = 3.4445, -4.7750, 2.0315
# On CPU matrices of this many elements are worked on one by one, which keeps each in cache; smaller ones, and all on
# accelerators, go in stacks, which saves calls.
ALONE = 2**16


def newton_schulz(stack: Tensor, *, steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Replaces the singular values of each matrix by values near 1 and keeps its singular vectors.

    X = M / (||M||_F + eps), transposed so that rows <= cols; then `steps` times
    P = X X^T;  X = A X + (B P + C P P) X.

    Args:
        stack: matrices, shape (batch, rows, cols); not modified.
        steps: number of quintic steps.
        eps: added to the Frobenius norm.
        dtype: dtype of the products; bfloat16 is enough for training.

    Returns:
        A new tensor (batch, rows, cols) of dtype `dtype`.

    Source: MARS-M paper (arXiv 2510.21800) and Muon; Keller Jordan's coefficients.
    """
    norm_dtype = torch.promote_types(stack.dtype, torch.float32)
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True, dtype=norm_dtype)
    x = (stack / (norms + eps)).to(dtype)
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    multiply_add: Callable[..., Tensor] = torch.baddbmm
    if len(x) == 1:  # for which the products of a batch are slower
        x, multiply_add = x[0], torch.addmm
    for _ in range(steps):
        p = x @ x.mT
        x = multiply_add(x, multiply_add(p, p, p, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).view(stack.shape)


def orthogonalised(matrices: list[Tensor], hyper: Hyper, eps: float) -> list[Tensor]:
    """NS5(M) of whole matrices of one shape, as new tensors of that shape in `ns_dtype`.

    A tensor with ndim > 2 counts as the matrix (first dimension, all others), a kernel; with `stacked` in `hyper` as a
    stack of matrices along its first dimension, the experts of a mixture. rows = out_features, cols = in_features; with
    `transposed` they are stored (in_features, out_features), as transformers' Conv1D stores them.
    """
    shape = matrices[0].shape
    if shape.numel() >= ALONE and len(matrices) > 1 and matrices[0].device.type == "cpu":
        return [u for matrix in matrices for u in orthogonalised([matrix], hyper, eps)]
    stack = torch.stack(matrices)
    stack = stack.flatten(0, 1) if hyper.stacked else stack.flatten(2)
    stack = stack.mT if hyper.transposed else stack
    stack = newton_schulz(stack, steps=hyper.ns_steps, eps=eps, dtype=hyper.ns_dtype)
    stack = stack.mT if hyper.transposed else stack
    return list(stack.reshape(len(matrices), *shape))


def rows_and_cols(shape: Sequence[int], hyper: Hyper) -> tuple[int, int]:
    """Of each matrix in a whole tensor of this shape, as `orthogonalised` takes it."""
    rows, *others = shape[1:] if hyper.stacked else shape
    return (prod(others), rows) if hyper.transposed else (rows, prod(others))
