"""Text of a model or a file made harmless: shown, never obeyed."""

from __future__ import annotations

import shlex
import unicodedata
from pathlib import Path

# Invisible characters that reorder text: a reader would see something else than what is there.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def plain(text: str) -> str:
    """Return `text` with control and reordering characters made visible; newlines and tabs stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def quoted(path: Path | str) -> str:
    """Return `path` as a shell takes it for one word, for a command that is to be copied."""
    return shlex.quote(str(path))


def _visible(character: str) -> str:
    """Return a harmless stand-in for a character that a terminal or a browser would obey."""
    if character in "\n\t":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if character in _REORDERING or unicodedata.category(character) in ("Cc", "Cs"):
        return "\ufffd"
    return character
