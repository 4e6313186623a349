"""`tepo explain NAME`: a method's formula, parts, settings and sources; or two methods side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tepo.objectives import DecodingOption, Described, Entry


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
    from tepo.cli.objectives import option_record, record
    from tepo.cli.terminal import print_json
    from tepo.objectives import decoding_options, entry

    option = next((option for option in decoding_options() if option.name == name), None)
    if option is not None and versus is None:
        print_json(option_record(option)) if as_json else _show_option(option, as_latex)
        return
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
    from tepo.cli.objectives import choice_text, parts
    from tepo.cli.terminal import console, print_table

    _show_head(entry, as_latex)
    rows = [
        (part, choice_text(choice), choice["does"])
        for part, choices in parts(entry).items()
        for choice in choices or [{"kind": "none", "values": {}, "does": ""}]
    ]
    print_table("Parts", ("part", "choice", "what it does"), rows, whole=1)
    _show_settings(entry)
    out, needs = console(), entry.needs
    out.print("Needs", style="bold")
    out.print(f"  of the batch: logp, mask{''.join(f', {name}' for name in sorted(needs.batch))}")
    out.print(f"  of the scorer: {', '.join(sorted(needs.scores)) or 'log-probs only'}")
    out.print(f"  a reference policy: {'yes' if needs.reference else 'no'}")
    out.print(f'\nIn a run: [objective] name = "{entry.name}"; settings go beside the name.')


def _show_option(option: DecodingOption, as_latex: bool) -> None:
    """Print everything known of one option of decoding."""
    from tepo.cli.terminal import console

    _show_head(option, as_latex)
    _show_settings(option)
    console().print(
        f"\nIt has no loss. In a run or an evaluation: {option.switch}; settings go into [{option.section}]."
    )


def _show_head(item: Described, as_latex: bool) -> None:
    """Print what something is, its paper, its status and its formula."""
    from tepo.cli.terminal import console

    out = console()
    out.print(f"{item.name}: {item.summary}", style="bold")
    paper = item.paper
    where = ", ".join(filter(None, [paper.venue, f"arXiv {paper.arxiv}" if paper.arxiv else "", str(paper.year)]))
    out.print(f"{paper.title} ({where})")
    out.print(f"status: {item.status}")
    out.print(f"\n  {item.latex if as_latex else item.formula}\n", soft_wrap=True)
    if item.notes:
        out.print(f"{item.notes}\n")


def _show_settings(item: Described) -> None:
    """Print every setting with its default and source, and those that are not confirmed."""
    from tepo.cli.objectives import value_text
    from tepo.cli.terminal import console

    out = console()
    out.print("Settings", style="bold")
    for setting in item.settings:
        out.print(f"  {setting.name} = {value_text(setting.default)}  ({setting.type})")
        confirmed = setting.status in ("confirmed", setting.source)
        source = setting.source if confirmed else f"{setting.status}: {setting.source}"
        out.print(f"      {setting.help} [{source}]", style="dim", soft_wrap=True)
    out.print("Not confirmed", style="bold")
    for setting in item.unsure:
        out.print(f"  {setting.name} ({setting.status}): {setting.help}", soft_wrap=True)
    if not item.unsure:
        out.print("  no default" if item.status == "confirmed" else f"  the formula ({item.status}), but no default")


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
