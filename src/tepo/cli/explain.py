"""`tepo explain NAME`: a method's formula, parts, settings and sources; or two methods side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tepo.objectives import Entry


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method of the catalogue: see tepo objectives.")],
    versus: Annotated[str | None, typer.Option("--versus", metavar="OTHER", help="Compare with this method.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a method: formula, parts, settings, where each comes from and what is inferred."""
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
        _show(chosen)
    else:
        _show_both(chosen, other)


def part_lines(entry: Entry) -> dict[str, str]:
    """Return part -> its choice as text; an empty part is "none"."""
    from tepo.cli.objectives import choice_text, parts

    return {part: "\n".join(map(choice_text, choices)) or "none" for part, choices in parts(entry).items()}


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


def _show(entry: Entry) -> None:
    """Print everything known of one method."""
    from tepo.cli.objectives import choice_text, parts
    from tepo.cli.terminal import console, print_table

    out = console()
    out.print(f"{entry.name}: {entry.summary}", style="bold")
    paper = entry.paper
    where = ", ".join(filter(None, [paper.venue, f"arXiv {paper.arxiv}" if paper.arxiv else "", str(paper.year)]))
    out.print(f"{paper.title} ({where})")
    out.print(f"status: {entry.status}")
    out.print(f"\n  {entry.formula}\n", soft_wrap=True)
    if entry.notes:
        out.print(f"{entry.notes}\n")
    rows = [
        (part, choice_text(choice), choice["does"])
        for part, choices in parts(entry).items()
        for choice in choices or [{"kind": "none", "values": {}, "does": ""}]
    ]
    print_table("Parts", ("part", "choice", "what it does"), rows)
    out.print("Settings", style="bold")
    for item in entry.settings:
        out.print(f"  {item.name} = {_word(item.default)}  ({item.type})")
        sure = item.source if item.status in ("confirmed", item.source) else f"{item.status}: {item.source}"
        out.print(f"      {item.help} [{sure}]", style="dim", soft_wrap=True)
    needs = entry.needs
    out.print("Needs", style="bold")
    out.print(f"  of the batch: logp, mask{''.join(f', {name}' for name in sorted(needs.batch))}")
    out.print(f"  of the scorer: {', '.join(sorted(needs.scores)) or 'log-probs only'}")
    out.print(f"  a reference policy: {'yes' if needs.reference else 'no'}")
    out.print(f'\nIn a run: [objective] name = "{entry.name}"; settings go beside the name.')


def _show_both(one: Entry, other: Entry) -> None:
    """Print two methods side by side, the differing rows marked."""
    from tepo.cli.terminal import console, print_table

    out = console()
    for entry in (one, other):
        out.print(f"{entry.name}: {entry.summary}", style="bold")
        out.print(f"  {entry.formula}\n", soft_wrap=True)
    lines, others = part_lines(one), part_lines(other)
    parts = [(_mark(lines[part], others[part]), part, lines[part], others[part]) for part in lines]
    print_table("Parts (* differs)", ("", "part", one.name, other.name), parts)
    differing = differences(one, other)["settings"]
    if differing:
        rows = [(name, _word(mine), _word(theirs)) for name, (mine, theirs) in differing.items()]
        print_table("Settings that differ", ("setting", one.name, other.name), rows)


def _mark(one: str, other: str) -> str:
    return "" if one == other else "*"


def _word(value: Any) -> str:
    """Return a value as a user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
