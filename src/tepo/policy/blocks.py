"""Rows of logits in blocks that stay in a processor's cache, shared among its threads.

Arithmetic on logits is a dozen short operations a block. Splitting each of them over the threads makes threads wait for
each other a dozen times a block, which costs more than the arithmetic, and far more on a busy machine. Here every
thread takes whole blocks instead, and computes each operation alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from threading import Barrier

import torch
from torch import Tensor

# Logits of one block: two megabytes of float32 on a processor (smaller ones make threads queue for the interpreter), a
# few launches on an accelerator.
_BLOCK_CPU = 1 << 19
_BLOCK_DEVICE = 1 << 26
# Python runs one thread at a time between operations, so more threads than this wait for each other again.
_MOST_THREADS = 8

Body = Callable[[slice, list[Tensor]], None]


def threads_of(device: torch.device) -> int:
    """Return how many threads share the blocks of a device's logits."""
    return min(torch.get_num_threads(), _MOST_THREADS) if device.type == "cpu" else 1


def each_block(logits: Tensor, body: Body, *, buffers: int) -> None:
    """Call `body` with the rows of each block of logits [n, V] and as many buffers [b, V], float32 or better.

    Blocks are taken in any order and at the same time: the body writes to its own rows alone, without autograd. What
    one row gives does not depend on the number of threads.
    """
    rows, vocabulary = logits.shape
    on_cpu = logits.device.type == "cpu"
    size = max(1, (_BLOCK_CPU if on_cpu else _BLOCK_DEVICE) // vocabulary)
    threads = min(threads_of(logits.device), -(-rows // size))
    inference = torch.is_inference_mode_enabled()

    def work(first: int, last: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            dtype = torch.promote_types(logits.dtype, torch.float32)
            held = [
                torch.empty(min(size, last - first), vocabulary, dtype=dtype, device=logits.device)
                for _ in range(buffers)
            ]
            for start in range(first, last, size):
                stop = min(start + size, last)
                body(slice(start, stop), [buffer[: stop - start] for buffer in held])

    if threads <= 1:
        work(0, rows)
        return
    bounds = [rows * index // threads for index in range(threads + 1)]
    pool = _workers(os.getpid(), threads_of(logits.device))
    for done in [pool.submit(work, first, last) for first, last in pairwise(bounds)]:
        done.result()


@lru_cache(maxsize=1)
def _workers(_process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads that compute each operation alone; one set a process, because a fork does not inherit them."""
    ours = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tepo-blocks")
    together = Barrier(threads + 1)

    def alone() -> None:
        torch.get_num_threads()  # a thread takes the process's number over at its first use, so this comes first
        torch.set_num_threads(1)
        together.wait()

    for _ in range(threads):
        pool.submit(alone)
    together.wait()
    # torch also notes the last number set, for threads that start later: they should get this process's own.
    torch.set_num_threads(ours)
    return pool
