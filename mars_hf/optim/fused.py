"""The element-wise part of the MARS rules in one compiled pass over memory, on CPU: `MARS(fused=True)`.

mars-adamw in float32 then moves 36 bytes per element (reads p, g, m, v, h, writes p, m, v, h) where separate
operations move 52 and torch's fused AdamW, without h, 28. The loops stand in fused.cpp. The system's C++ compiler
builds them for the CPU at hand in about two seconds, once in each process that wants them. Nothing is kept on disk, so
processes cannot wait for each other or load what was built for another CPU.
"""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_hf.optim.rules import MARS_RULES, Factors, Hyper, State, Tensors, alpha, state_names
from mars_hf.optim.tensors import name_of, tensor_of

# Neither flag about mathematics changes a value: they let square roots and comparisons become vector code.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")

_PASSES = {"mars-adamw": "adamw", "mars-lion": "lion", "mars-shampoo": "momentum", "mars-m": "momentum"}
_NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16", None: "nothing"}
_PARAMETER_DTYPES = (torch.float32, torch.float64)


class _Hyper(ctypes.Structure):
    """`Hyper` of fused.cpp."""

    _names = ("lr", "weight_decay", "beta1", "beta2", "eps", "alpha", "gamma", "clip_c")
    _fields_ = (*((name, ctypes.c_double) for name in _names), ("renew", ctypes.c_int64))


class _Tensors(ctypes.Structure):
    """`Tensors` of fused.cpp."""

    _names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "last_grads")
    _fields_ = (
        ("count", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in _names),
        ("steps", ctypes.POINTER(ctypes.c_double)),
        ("factors", ctypes.POINTER(ctypes.c_double)),
    )


def check_fused(group: dict[str, Any]) -> None:
    """Raises ValueError where the group's rule is one of MARS and its tensors or options have no compiled pass.

    Builds the passes, if this process has not yet. The other rules do without: torch's kernel serves adamw, muon and
    moonlight take their ordinary path.
    """
    if group["rule"] not in MARS_RULES:
        return
    way_out = "leave fused out"
    if group["rule"] == "mars-adamw" and group["amsgrad"]:
        raise ValueError(f"fused=True does not serve amsgrad=True: {way_out}")
    h_dtype = group["last_grad_dtype"] if "last_grad" in state_names(group) else None
    for i, p in enumerate(map(tensor_of, group["params"])):
        if p.device.type != "cpu" or p.dtype not in _PARAMETER_DTYPES:
            raise ValueError(
                f"fused=True serves float32 and float64 on the CPU, but {name_of(p, group, i)} is {p.dtype} on "
                f"{p.device}: {way_out}"
            )
        if h_dtype not in (None, p.dtype, torch.bfloat16):
            raise ValueError(
                f"fused=True does not serve last_grad_dtype={h_dtype}, {name_of(p, group, i)} being {p.dtype}: "
                f"pass None or torch.bfloat16, or {way_out}"
            )
    passes()


@functools.cache
def passes() -> ctypes.CDLL:
    """The compiled passes.

    Raises:
        ValueError: no compiler, or it failed.
    """
    source = Path(__file__).with_suffix(".cpp")
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "g++"]
    way_out = "leave fused out, or install g++ (another compiler with OpenMP: set CXX)"
    with tempfile.TemporaryDirectory(prefix="mars_hf_") as folder:
        library = Path(folder) / "fused.so"
        try:
            built = subprocess.run([*compiler, *FLAGS, source, "-o", library], capture_output=True, text=True)
        except OSError as error:
            raise ValueError(f"fused=True found no C++ compiler ({error}): {way_out}") from None
        if built.returncode:
            complaint = next((line for line in built.stderr.splitlines() if "error" in line), "no message")
            raise ValueError(f"fused=True could not be built, {compiler[0]} says {complaint!r}: {way_out}")
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise ValueError(
                f"fused=True could not be loaded ({error}): leave fused out, or set TMPDIR to a folder that allows "
                "executables"
            ) from None


def squared_norms_of_c(grads: Tensors, last_grads: Tensors, hyper: Hyper) -> Tensor:
    """||c||_2^2 of each tensor before the clip, shape (tensors,), float64, summed in float64; writes nothing."""
    dtype, h_dtype = grads[0].dtype, last_grads[0].dtype
    squares = (ctypes.c_double * len(grads))()
    tensors = _Tensors(
        count=len(grads),
        sizes=_array(ctypes.c_int64, [g.numel() for g in grads]),
        grads=_addresses("gradient", grads, grads, dtype),
        last_grads=_addresses("last_grad", last_grads, grads, h_dtype),
    )
    run = getattr(passes(), f"squared_norms_{_NAMES[dtype]}_{_NAMES[h_dtype]}")
    run(ctypes.byref(tensors), ctypes.c_double(alpha(hyper)), squares, torch.get_num_threads())
    return torch.tensor(list(squares), dtype=torch.float64)


def update_(
    params: Tensors,
    grads: Tensors,
    state: State,
    hyper: Hyper,
    *,
    factors: Factors | None = None,
    clips: bool = False,
) -> None:
    """All that a MARS rule does element by element, h <- g in approx mode included.

    Args:
        params: tensors of one dtype on the CPU; modified in place, but for the matrix rules.
        grads: their gradients; only read.
        state: for each of `state_names(hyper)` the list of tensors, `step` counting this step; modified in place.
        hyper: the param group.
        factors: of the clip of c, a number for each tensor; None: 1.
        clips: measures ||c|| of each tensor, which must be whole, and clips it by `clip_c`.

    All tensors that belong together have the elements of their memory in the same order.
    """
    dtype = params[0].dtype
    h_dtype = state["last_grad"][0].dtype if "last_grad" in state else None
    dtypes = {"exp_avg": dtype, "exp_avg_sq": dtype, "last_grad": h_dtype}
    written = {name: _addresses(name, state[name], params, dtypes[name]) for name in dtypes if name in state}
    tensors = _Tensors(
        count=len(params),
        sizes=_array(ctypes.c_int64, [p.numel() for p in params]),
        params=_addresses("parameter", params, params, dtype),
        grads=_addresses("gradient", grads, params, dtype),
        **{f"{name}s": addresses for name, addresses in written.items()},
        steps=_array(ctypes.c_double, torch.stack(state["step"]).tolist() if "step" in state else []),
        factors=_array(ctypes.c_double, [1.0] * len(params) if factors is None else factors),
    )
    beta1, beta2 = hyper["betas"]
    numbers = {name: hyper[name] for name in ("lr", "weight_decay", "eps", "gamma")}
    numbers["clip_c"] = hyper["clip_c"] if clips else float("inf")
    numbers |= {"beta1": beta1, "beta2": beta2, "alpha": alpha(hyper)}
    hypers = _Hyper(**numbers, renew=hyper["is_approx"])
    run = getattr(passes(), f"{_PASSES[hyper['rule']]}_{_NAMES[dtype]}_{_NAMES[h_dtype]}")
    run(ctypes.byref(tensors), ctypes.byref(hypers), torch.get_num_threads())
    # Autograd learns of writes from the version counters.
    torch.autograd.graph.increment_version([*params, *(t for name in written for t in state[name])])


def _addresses(name: str, tensors: Tensors, params: Tensors, dtype: torch.dtype | None) -> Any:
    """Where the elements of each tensor begin, after a check that there are as many as the pass will touch."""
    for t, p in zip(tensors, params):
        if t.dtype != dtype or t.numel() != p.numel():
            raise ValueError(
                f"fused=True: {name} of shape {tuple(t.shape)} and {t.dtype} does not fit its parameter of shape "
                f"{tuple(p.shape)} and {p.dtype}: load the state of the same model, or leave fused out"
            )
    return _array(ctypes.c_void_p, [t.data_ptr() for t in tensors])


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)
