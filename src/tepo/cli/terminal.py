"""What the verbs share in speaking to a terminal: consoles, safe text, tables, JSON.

Results go to stdout and everything else to stderr, so that a program can read the results. Consoles parse no markup:
text of a model or a file is shown, never obeyed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tepo.core.text import plain as plain  # noqa: PLC0414  verbs find it here

if TYPE_CHECKING:
    from rich.console import Console


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
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str) + "\n")


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

    Columns from number `right` on are aligned to the right (numbers); the first `whole` are never broken (names).
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for index, column in enumerate(columns):
        number = right is not None and index >= right
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=index < whole)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console().print(table)
