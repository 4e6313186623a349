"""What a verb that computes settles in its process before the heavy libraries are loaded."""

from __future__ import annotations

import os

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # bars of the libraries would break into ours
    "TOKENIZERS_PARALLELISM": "false",  # reward workers are started from this process
}


def prepare() -> None:
    """Quieten the libraries, unless the environment says otherwise, and keep freed memory."""
    from tepo.core.allocator import keep_freed_memory

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    keep_freed_memory()
