"""`tepo explain NAME`: a method's formula, parts, settings and sources; or two methods side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tepo.objectives import Entry


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method of the catalogue: see tepo objectives.")],
    versus: Annotated[
        str | None, typer.Option("--versus", metavar="OTHER", help="Show only what differs from this method.")
    ] = None,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print formulas in LaTeX.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a method: formula, parts, settings, where each comes from and what is inferred.

    With --versus, only the parts and settings in which two methods differ.
    """
    from tepo.cli.objectives import record
    from tepo.cli.terminal import print_json
    from tepo.objectives import entry

    chosen = entry(name)
    other = entry(versus) if versus is not None else None
    if as_json and other is None:
        print_json(record(chosen))
    elif as_json and other is not None:
        print_json({"methods": [record(chosen), record(other)], "differences": differences(chosen, other)})
    elif other is None:
        _show(chosen, as_latex)
    else:
        _show_both(chosen, other, as_latex)


def part_lines(entry: Entry) -> dict[str, str]:
    """Return part -> its choice as text; an empty part is "none"."""
    from tepo.cli.objectives import choice_text, parts

    return {part: "\n".join(map(choice_text, choices)) or "none" for part, choices in parts(entry).items()}


def part_words(entry: Entry) -> dict[str, str]:
    """Return part -> its choice and what that does, in words."""
    from tepo.cli.objectives import choice_text, parts

    return {
        part: "\n".join(f"{choice_text(choice)}: {choice['does']}" for choice in choices) or "none"
        for part, choices in parts(entry).items()
    }


def differences(one: Entry, other: Entry) -> dict[str, Any]:
    """Return the parts and the settings in which two methods differ, the first method's value first."""
    lines, others = part_lines(one), part_lines(other)
    settings = {setting.name: setting.default for setting in one.settings}
    other_settings = {setting.name: setting.default for setting in other.settings}
    names = [*settings, *(name for name in other_settings if name not in settings)]
    absent = "absent"
    return {
        "parts": {part: [lines[part], others[part]] for part in lines if lines[part] != others[part]},
        "settings": {
            name: [settings.get(name, absent), other_settings.get(name, absent)]
            for name in names
            if settings.get(name, absent) != other_settings.get(name, absent)
        },
    }


def _show(entry: Entry, as_latex: bool) -> None:
    """Print everything known of one method."""
    from tepo.cli.objectives import choice_text, parts, value_text
    from tepo.cli.terminal import console, print_table

    out = console()
    out.print(f"{entry.name}: {entry.summary}", style="bold")
    paper = entry.paper
    where = ", ".join(filter(None, [paper.venue, f"arXiv {paper.arxiv}" if paper.arxiv else "", str(paper.year)]))
    out.print(f"{paper.title} ({where})")
    out.print(f"status: {entry.status}")
    out.print(f"\n  {entry.latex if as_latex else entry.formula}\n", soft_wrap=True)
    if entry.notes:
        out.print(f"{entry.notes}\n")
    rows = [
        (part, choice_text(choice), choice["does"])
        for part, choices in parts(entry).items()
        for choice in choices or [{"kind": "none", "values": {}, "does": ""}]
    ]
    print_table("Parts", ("part", "choice", "what it does"), rows, whole=1)
    out.print("Settings", style="bold")
    for item in entry.settings:
        out.print(f"  {item.name} = {value_text(item.default)}  ({item.type})")
        sure = item.source if item.status in ("confirmed", item.source) else f"{item.status}: {item.source}"
        out.print(f"      {item.help} [{sure}]", style="dim", soft_wrap=True)
    out.print("Not confirmed", style="bold")
    for item in entry.unsure:
        out.print(f"  {item.name} ({item.status}): {item.help}", soft_wrap=True)
    if not entry.unsure:
        out.print("  no default" if entry.status == "confirmed" else f"  the formula ({entry.status}), but no default")
    needs = entry.needs
    out.print("Needs", style="bold")
    out.print(f"  of the batch: logp, mask{''.join(f', {name}' for name in sorted(needs.batch))}")
    out.print(f"  of the scorer: {', '.join(sorted(needs.scores)) or 'log-probs only'}")
    out.print(f"  a reference policy: {'yes' if needs.reference else 'no'}")
    out.print(f'\nIn a run: [objective] name = "{entry.name}"; settings go beside the name.')


def _show_both(one: Entry, other: Entry, as_latex: bool) -> None:
    """Print the formulas of two methods, and the parts and settings in which they differ."""
    from tepo.cli.objectives import value_text
    from tepo.cli.terminal import console, print_table

    out = console()
    for entry in (one, other):
        out.print(f"{entry.name}: {entry.summary}", style="bold")
        out.print(f"  {entry.latex if as_latex else entry.formula}\n", soft_wrap=True)
    differing = differences(one, other)
    if differing["parts"]:
        mine, theirs = part_words(one), part_words(other)
        rows = [(part, mine[part], theirs[part]) for part in differing["parts"]]
        print_table("Parts that differ", ("part", one.name, other.name), rows, whole=1)
        alike = [part for part in mine if part not in differing["parts"]]
        out.print(f"The same: {', '.join(alike)}.", soft_wrap=True)
    else:
        out.print("The same parts with the same values: at their defaults the two are one objective.", soft_wrap=True)
    if differing["settings"]:
        rows = [(name, value_text(mine), value_text(theirs)) for name, (mine, theirs) in differing["settings"].items()]
        print_table("Settings that differ", ("setting", one.name, other.name), rows, whole=1)
