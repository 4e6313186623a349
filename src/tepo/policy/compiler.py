"""Whether functions can be compiled for this machine's processor, and the threads they run in."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import numpy as np
import torch


@functools.cache
def why_no_compiler() -> str | None:
    """Return why numba cannot be used, or None; chooses the threads its functions run in.

    Its own pool of threads ends the process when two threads of Python call at once; OpenMP's does not.
    """
    if find_spec("numba") is None:
        return "the package numba is not installed (pip install 'tepo[cpu]')"
    import numba

    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "threadsafe"
    threads = torch.get_num_threads()
    try:
        from tepo.policy.compiled_softmax import fold

        use_threads_of_torch()
        fold(np.zeros((1, 2), np.float32), np.float32(1), np.zeros(1, np.float32), *np.zeros((2, 1)))
    except Exception as error:  # whatever goes wrong inside a compiler, there is another way to compute
        return f"numba does not work here ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    finally:
        torch.set_num_threads(threads)  # numba's start sets the number for all users of the OpenMP library
    return None


def use_threads_of_torch() -> None:
    """Let compiled functions called from this thread run in as many threads as tensor operations do.

    More than there are cores free stall each other: every function ends by waiting for all of them.
    """
    import numba

    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
