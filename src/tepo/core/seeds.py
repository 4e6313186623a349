"""Addressed randomness: a draw is a function of where it is used, never of how many draws came before.

Every consumer derives its own key from (run seed, purpose, indices) and feeds it to a counter-based generator.
So a resumed run, another batch composition or another machine layout sees the same draws.
"""

from __future__ import annotations

import hashlib
import random


def address(seed: int, purpose: str, *indices: int) -> int:
    """Return the 128-bit key of one place: the same arguments give the same key on every machine.

    The arguments are written with separators before hashing, so ("a", 1, 23) and ("a", 12, 3) differ.
    """
    text = "\x1f".join([str(int(seed)), purpose, *(str(int(index)) for index in indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, *indices: int) -> random.Random:
    """Return a standard-library generator for one place, for shuffles and choices of a few items."""
    return random.Random(address(seed, purpose, *indices))
