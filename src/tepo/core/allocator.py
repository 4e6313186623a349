"""Keep freed memory inside the process, so that every training step does not fault its pages in again.

By default glibc takes large blocks from the kernel with mmap and gives them back at every free. A training step frees
and takes gigabytes, and each page then costs a fault and a cleared page: up to a third of the time on a processor.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

# Parameters of mallopt(3), from malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_TOP_PAD_BYTES = 256 << 20

SWITCH = "TEPO_KEEP_MEMORY"
"""Set this variable of the environment to 0 and the allocator is left as it is."""

_kept = False


def keep_freed_memory() -> bool:
    """Tell the allocator to keep what is freed and to grow in steps of 256 MiB; return whether it could be told.

    Only glibc on Linux knows these settings, and `TEPO_KEEP_MEMORY=0` in the environment forbids them. Call it before
    the first large allocation, so before torch computes.
    The process then stays at its peak size; nothing else changes.
    """
    global _kept  # noqa: PLW0603 - a setting of the process, like the allocator's own
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    # -1 as the trim threshold is the largest size: the top of the heap is never given back.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD_BYTES))
    answers = [mallopt(name, value) for name, value in settings]
    _kept = all(answer == 1 for answer in answers)
    return _kept


def is_on() -> bool:
    """Return whether freed memory is kept: `keep_freed_memory` was called, or the environment asks glibc for it."""
    return _kept or os.environ.get("MALLOC_MMAP_MAX_") == "0"
