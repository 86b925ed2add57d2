"""How much memory a process has in use, as the C library counts it: torch on CPUs takes all of its memory there."""

import ctypes
import gc
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from mars_hf import MARS

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def bytes_in_use() -> int:
    """What malloc has given out, small pieces and mapped ones; 0 where the C library does not tell (glibc does)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


class MemoryGauge:
    """Around a training: the most that it had in use between a backward pass and the step of the optimizer.

    `most` are bytes, beyond those at the start; DeepSpeed's own work before the step counts too.
    """

    def __enter__(self) -> "MemoryGauge":
        gc.unfreeze()
        gc.collect()
        self._before, self.most = bytes_in_use(), 0
        self._hook = register_optimizer_step_pre_hook(lambda opt, *_: self._look() if isinstance(opt, MARS) else None)
        self._engine: Any = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
        if self._engine is not None:
            self._step = self._engine.step

            def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
                self._look()
                return self._step(engine, *args, **kwargs)

            self._engine.step = step
        return self

    def _look(self) -> None:
        self.most = max(self.most, bytes_in_use() - self._before)

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
        if self._engine is not None:
            self._engine.step = self._step
