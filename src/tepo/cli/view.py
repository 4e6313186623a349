"""`tepo view RUN`: the sampled responses of a run, token by token, as a page or in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo.core.errors import InputError, nearest

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from tepo.lab.tokens import Inspection
    from tepo.objectives import TokenBatch

SHOWN = 16
"""Responses shown in a terminal where no number is given."""
# Marks by the bits of `tepo.lab.tokens.FLAGS`, the same as on the page.
_GLYPHS = {1: "▾", 2: "▴", 4: "◆", 8: "✕", 16: "◉", 32: "○"}
_LEGEND = "▾ clipped below  ▴ clipped above  ◆ dual clip  ✕ response left out  ◉ under the mask  ○ not chosen"
_SEQUENTIAL = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_POSITIVE, _NEGATIVE, _GROUND = (86, 160, 235), (240, 140, 60), (30, 32, 38)
QUANTITIES = ("credit", "entropy-credit", "advantage", "weight", "entropy", "entropy-change", "ratio", "kl", "surprise")
_SIGNED = frozenset({"credit", "entropy-credit", "advantage", "entropy-change", "ratio"})


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Show this step alone.")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option("--objective", metavar="NAME", help="See it under this method too (may be repeated)."),
    ] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show tokens here, in colour; write no page.")] = False,
    quantity: Annotated[
        str, typer.Option("--quantity", help=f"With --terminal, colour by: {', '.join(QUANTITIES)}.")
    ] = "credit",
    most: Annotated[int | None, typer.Option("--most", min=1, help="Show at most so many responses.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Look at every token of a run's responses: credit, advantage, entropy, ratio, KL, mask, clip."""
    if quantity not in QUANTITIES:
        raise InputError(f"--quantity {quantity!r} is not known.{nearest(quantity, QUANTITIES)}")
    if terminal:
        _show(run, step, objective or [], quantity, most or SHOWN)
        return
    from tepo.cli.terminal import plain, print_json
    from tepo.lab.view import MOST_RESPONSES, write_view

    path, words = write_view(run, step=step, names=objective or (), most=most or MOST_RESPONSES)
    if as_json:
        print_json({"view": str(path), "holds": words})
    else:
        typer.echo(plain(f"{path}: {words}"))
    if opened and not as_json:
        typer.launch(path.resolve().as_uri())


def _show(run: Path, step: int | None, names: Sequence[str], quantity: str, most: int) -> None:
    """Print the responses of a step (the last one kept) under the run's objective, or the one that is named."""
    from rich.text import Text

    from tepo.cli.terminal import console, plain
    from tepo.lab.tokens import inspect, read_step, token_batch
    from tepo.lab.view import choices, kept_steps, named

    steps = kept_steps(run, step)
    if not steps:
        raise InputError(f"{run} holds no kept response: set log.rollouts above 0 in the run's configuration")
    number, path = steps[-1]
    records = read_step(path)
    batch = token_batch(records)
    method = named(names[0]) if names else choices(run)[0]
    seen = inspect(method.objective, batch)
    values = values_of(quantity, batch, seen)
    out = console()
    out.print(f"step {number} under {method.label}, coloured by {quantity}", style="bold")
    if values is None:
        out.print(f"{quantity}: not applicable to {method.label}, or not recorded")
    out.print(Text(f"{_LEGEND}  + above 0  - below 0", style="dim"))
    extent = 1.0 if values is None else float(values[batch.mask].abs().max()) or 1.0
    for row, record in enumerate(records[:most]):
        if row == 0 or records[row - 1]["draw"] != record["draw"]:
            out.print(Text(f"\n{plain(record['question'])}  (reference: {plain(str(record['answer']))})", style="bold"))
        verdict = "✓" if record["passed"] else "✗"
        out.print(Text(f"{verdict} reward {record['reward']}, sample {record['sample']}", style="dim"))
        tokens = record.get("tokens") or [str(token) for token in record["token_ids"]]
        line = None if values is None else values[row].tolist()
        out.print(coloured(tokens, line, seen.flags[row].tolist(), extent, signed=quantity in _SIGNED), soft_wrap=True)
    if len(records) > most:
        out.print(f"\n{len(records) - most} more responses of this step: --most {len(records)}", style="dim")


def values_of(quantity: str, batch: TokenBatch, seen: Inspection) -> Tensor | None:
    """Return a quantity of every token, `[B, T]`; None where the method or the records do not have it."""
    import torch

    old = batch.logp if batch.old_logp is None else batch.old_logp
    change = None if batch.entropy is None or batch.old_entropy is None else batch.entropy - batch.old_entropy
    known: dict[str, Any] = {
        "credit": seen.credit,
        "entropy-credit": seen.entropy_credit,
        "advantage": seen.advantage,
        "weight": seen.weight,
        "entropy": batch.entropy,
        "entropy-change": change,
        "ratio": batch.logp - old,
        "kl": torch.expm1(old - batch.logp) - (old - batch.logp),
        "surprise": -batch.logp,
    }
    found: Tensor | None = known[quantity]
    return found


def coloured(
    tokens: Sequence[str], values: Sequence[float] | None, flags: Sequence[int], extent: float, *, signed: bool
) -> Text:
    """Return the tokens of a response with their colours, signs and marks; nothing in them is obeyed."""
    from rich.text import Text

    from tepo.lab.view import shown_token

    line = Text()
    for index, token in enumerate(tokens):
        marks = "".join(glyph for bit, glyph in _GLYPHS.items() if flags[index] & bit)
        text = shown_token(token).replace("\n", "⏎").replace("\t", "⇥") + marks + "\n" * token.count("\n")
        if values is None:
            line.append(text)
            continue
        share = values[index] / extent
        if signed:
            sign = "" if abs(share) < 0.02 else "+" if share > 0 else "-"
            colour = _mix(_GROUND, _POSITIVE if share > 0 else _NEGATIVE, min(1.0, abs(share)))
        else:
            sign, colour = "", viridis(share)
        ink = "black" if 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 120 else "white"
        line.append(f"{sign}{text}", style=f"{ink} on rgb({','.join(map(str, colour))})")
    return line


def viridis(share: float) -> tuple[int, int, int]:
    """Return the colour of a share in [0, 1]; beyond, that of the end."""
    place = min(1.0, max(0.0, share)) * (len(_SEQUENTIAL) - 1)
    low = min(int(place), len(_SEQUENTIAL) - 2)
    return _mix(_SEQUENTIAL[low], _SEQUENTIAL[low + 1], place - low)


def _mix(start: tuple[int, int, int], end: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    red, green, blue = (round(one + (other - one) * share) for one, other in zip(start, end, strict=True))
    return red, green, blue
