"""Files that are either whole or absent: everything is written aside, flushed and renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def exists(path: str) -> bool:
    """Return whether `path` names a file or folder; a text too long for a name is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; the previous content survives any failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.chmod(name, 0o666 & ~_umask())
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and flush it; a line cut by a crash is dropped by `read_lines`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, dropping a last line that a crash cut short."""
    records: list[dict[str, Any]] = []
    # Bytes, since a cut may go through a character; and only \n ends a line: text's splitlines() would also cut at
    # separators that JSON leaves inside a string.
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError):
            if number == len(lines) - 1:
                break
            raise
    return records


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` and rename it to `path` on success; on failure nothing is left behind.

    An existing `path` is replaced only after the new folder is complete and flushed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    aside.chmod(0o777 & ~_umask())
    try:
        yield aside
        for file in aside.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            os.replace(path, old)
        os.replace(aside, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _umask() -> int:
    """Return the process's umask: temporary files are private, but what they become is for whoever may read it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
