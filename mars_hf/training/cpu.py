"""Training on CPUs: memory that is not given back between steps."""

import ctypes
import sys

# glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Makes this process keep the memory it frees, for its next step.

    glibc returns large arrays to the kernel when they are freed, which clears every page anew when the next step asks
    for them: activations and gradients of a step of GPT-2 small are some hundred thousand pages, a third of its time.
    The process then stays at its peak, and arrays of very different sizes may leave gaps. It holds for the process and
    those that it forks, and cannot be undone.

    Returns:
        Whether this is Linux with glibc; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # No arrays outside the heap, and no trimming of it.
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)])
