"""`MARS(fused=True)`: the functions of rules.py through torch.compile, one pass over memory for each.

mars-adamw in float32 then moves 36 bytes per element (reads p, g, m, v, h, writes p, m, v, h) where separate
operations move 52 and torch's fused AdamW, without h, 28.

A function is compiled once for each dtype and set of options, whatever the shapes and the schedule: it is given one
tensor at a time, flat, with a size that it does not know, and every number as a 0-dim tensor. A call takes about 60
microseconds, more than the passes that it saves for a small tensor, so those are updated eagerly.
"""

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.chunks import Function, in_lists, select
from mars_hf.optim.hyper import DTYPES
from mars_hf.optim.param_groups import name_of
from mars_hf.optim.rules import Numbers, Tensors
from mars_hf.optim.update import Path

DEVICES = ("cpu", "cuda")
SMALL = 2**17  # elements


def check_served(p: Tensor, group: dict[str, Any]) -> None:
    """Raises ValueError where a parameter of the group cannot be served; meta tensors wait for their device."""
    if p.device.type not in (*DEVICES, "meta") or p.dtype not in DTYPES:
        raise ValueError(
            f"fused=True serves float16 to float64 on CPU and CUDA, but {name_of(p, group)} is {p.dtype} on "
            f"{p.device}: leave fused out"
        )
    if p.device.type in DEVICES:
        _check_compiler(p.device.type)


@functools.cache
def _check_compiler(device: str) -> None:
    """Raises ValueError where torch.compile does not work; takes seconds when it is first asked."""
    try:
        torch.compile(torch.sign, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        complaint = " ".join(str(cause).split())[:200]
        raise ValueError(
            f"fused=True: torch.compile fails ({type(cause).__name__}: {complaint}): leave fused out, or install what "
            "it needs (on CPUs a C++ compiler with OpenMP, g++)"
        ) from None


def compiled(function: Function, x: Tensors, n: Numbers) -> list[Tensor]:
    """Applies a function of rules.py to each tensor by itself, in one compiled pass, and to small ones as they are.

    Args:
        function: see rules.py.
        x: whole tensors or parts of them; modified as the function modifies them.
        n: the numbers.

    Returns:
        What the function returns for each tensor; those that are no numbers in the shape of its parameter.
    """
    small = [i for i, p in enumerate(x.params) if p.numel() < SMALL]
    results = dict(zip(small, in_lists(function, select(x, small), n))) if small else {}
    if len(small) == len(x.params):
        return list(results.values())
    scale = 1.0 if n.scale is None else n.scale
    numbers = _numbers(x, n._replace(scale=scale if isinstance(scale, float) else _flat(scale)))
    clip = x.clip if not x.clip or isinstance(x.clip[0], Tensor) else _scalars(x.clip, x.params[0])
    tensors = x._replace(clip=clip, step=[], c=[])
    for i, p in enumerate(x.params):
        if p.numel() >= SMALL:
            flat = Tensors(*([_flat(t) for t in one] for one in select(tensors, [i])))
            kind = (numbers[i].is_approx, *(one[0].dtype if one else None for one in flat))
            for result in _compiled(function, kind)(flat, numbers[i]) or ():
                results[i] = result.as_strided(p.shape, p.stride()) if result.dim() else result
    # Autograd learns of writes from the version counters, which `data` leaves alone.
    torch.autograd.graph.increment_version([t for tensors in x._replace(grads=[], clip=[]) for t in tensors])
    return [results[i] for i in sorted(results)]


COMPILED = Path(compiled, compiled)


@functools.cache
def _compiled(function: Callable[..., Any], kind: Hashable) -> Callable[..., Any]:
    # In code of its own, because torch compiles the same code only so many times.
    code = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(code, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def _flat(tensor: Tensor) -> Tensor:
    """The elements in the order of memory, in which parameter, gradient and state agree; a number as it is.

    `data`, because a view brings its base along, for whose number of dimensions torch would compile anew.
    """
    return (tensor.as_strided((tensor.numel(),), (1,)) if tensor.dim() else tensor).data


def _scalars(values: Any, p: Tensor) -> list[Tensor]:
    """Numbers as 0-dim tensors for a compiled function, where no value of theirs recompiles; no host sync."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    vector = torch.as_tensor(values, dtype=dtype).to(p.device, non_blocking=True)
    return [_flat(scalar) for scalar in vector.unbind()]


def _numbers(x: Tensors, n: Numbers) -> list[Numbers]:
    """The numbers of each tensor."""
    p = x.params[0]
    names = [name for name, value in n._asdict().items() if isinstance(value, float)]
    scalars: dict[str, Any] = dict(zip(names, _scalars([getattr(n, name) for name in names], p)))
    numbers = n._replace(**scalars)
    if not x.step:
        return [numbers] * len(x.params)
    steps = torch.stack(x.step).double()
    columns = (_scalars(values, p) for values in (n.lr / (1 - n.beta1**steps), 1 / (1 - n.beta2**steps)))
    return [
        numbers._replace(step_size=step_size, v_correction=v_correction) for step_size, v_correction in zip(*columns)
    ]
