"""What the verbs share in speaking to a terminal: consoles, safe text, tables, JSON.

Results go to stdout and everything else to stderr, so that a program can read the results. Consoles parse no markup:
text of a model or a file is shown, never obeyed.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tepo.core.text import plain as plain  # noqa: PLC0414  verbs find it here

if TYPE_CHECKING:
    from rich.console import Console

_NARROWEST = 8
"""Characters that a column which may be broken has at least."""


def write_any_text() -> None:
    """Let standard output and error show characters that their encoding lacks as escapes, where Python would fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout, or stderr, that interprets nothing in the text it is given."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def complain(text: str) -> None:
    """Write an error to stderr."""
    first, *rest = plain(text).split("\n")
    lines = [f"error: {first}", *(f"       {line}" for line in rest)]
    sys.stderr.write("\n".join(lines) + "\n")


def speaker() -> Callable[[str], None]:
    """Return the function through which the rooms say what they do, on stderr."""
    out = console(stderr=True)

    def say(text: str) -> None:
        out.print(plain(text), style="dim", soft_wrap=True)

    return say


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout, alone; what is not a finite number is null."""
    escaped = not (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=escaped, default=str) + "\n")


def _finite(value: Any) -> Any:
    """Return `value` with NaN and infinities replaced, which JSON has no words for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_finite(item) for item in value)
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: int | None = None, whole: int = 0
) -> None:
    """Print a table on stdout.

    Columns from number `right` on are aligned to the right (numbers); the first `whole` are not broken (names), where
    the terminal is wide enough for them.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    out = console()
    cells = [[plain(cell) for cell in row] for row in rows]
    wide = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    # The others keep a few characters each, and two spaces stand between columns.
    room = out.width - (len(columns) - whole) * _NARROWEST - 2 * (len(columns) - 1)
    unbroken = whole if sum(wide[:whole]) <= room else 0
    for index, column in enumerate(columns):
        number = right is not None and index >= right
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=index < unbroken)
    for row in cells:
        table.add_row(*map(Text, row))
    out.print(table)
