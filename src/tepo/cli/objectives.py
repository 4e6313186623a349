"""`tepo objectives`: the catalogue, one line a method."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tepo.objectives import DecodingOption, Described, Entry


_NOT_PARTS = ("name", "log_ratio_clamp", "learnable", "ptx_coef", "partner")
"""Fields of an objective that are no parts of its formula."""


def objectives(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every setting.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/objectives.md: all of it.")] = False,
) -> None:
    """List the methods of the catalogue; `tepo explain NAME` tells more about one."""
    from tepo.cli.catalogue_page import page
    from tepo.cli.terminal import console, print_json, print_table
    from tepo.objectives import decoding_options
    from tepo.objectives import objectives as catalogue

    entries, options = catalogue(), decoding_options()
    if as_json:
        print_json([*map(record, entries), *map(option_record, options)])
        return
    if as_markdown:
        sys.stdout.write(page(entries, options))
        return
    listed: list[tuple[Described, str]] = [(entry, needs_text(entry)) for entry in entries]
    listed += [(option, option.section) for option in options]
    rows = [(item.name, paper_text(item), item.status, item.summary, needs) for item, needs in listed]
    print_table("Objectives", ("name", "paper", "status", "what it is", "needs"), rows, whole=3)
    out = console()
    out.print(
        "confirmed: read in the paper or its code. inferred: reconstructed, every choice a setting. "
        "experimental: a reading of our own where the record has no formula. paper: its arXiv id, or the year."
    )
    out.print("More: tepo explain NAME. Two side by side: tepo explain NAME --versus OTHER.")


def record(entry: Entry) -> dict[str, Any]:
    """Return an entry as plain values."""
    return {
        "kind": "objective",
        **_told(entry),
        "parts": parts(entry),
        "needs": {field.name: getattr(entry.needs, field.name) for field in dataclasses.fields(entry.needs)},
    }


def option_record(option: DecodingOption) -> dict[str, Any]:
    """Return a decoding option as plain values; it has no parts, and needs nothing but its section."""
    return {"kind": "decoding option", **_told(option), "section": option.section}


def _told(item: Described) -> dict[str, Any]:
    """Return what the catalogue tells of anything in it, as plain values."""
    return {
        "name": item.name,
        "summary": item.summary,
        "paper": dataclasses.asdict(item.paper),
        "status": item.status,
        "formula": item.formula,
        "latex": item.latex,
        "notes": item.notes,
        "settings": [dataclasses.asdict(setting) for setting in item.settings],
    }


def paper_text(item: Described) -> str:
    """Return where something comes from, briefly: its arXiv id, or the year of a paper that has none."""
    return item.paper.arxiv or str(item.paper.year)


def parts(entry: Entry) -> dict[str, list[dict[str, Any]]]:
    """Return what the objective is composed of: part -> its choices, each with its values and what it does."""
    composed: dict[str, list[dict[str, Any]]] = {}
    for field in dataclasses.fields(entry.objective):
        value = getattr(entry.objective, field.name)
        if field.name not in _NOT_PARTS:
            composed[field.name] = [_choice(choice) for choice in (value if isinstance(value, tuple) else (value,))]
    return composed


def _choice(part: Any) -> dict[str, Any]:
    """Return one part as plain values."""
    return {
        "kind": type(part).__name__,
        "values": {
            field.name: _value(value)
            for field in dataclasses.fields(part)
            if not isinstance(value := getattr(part, field.name), frozenset)
        },
        "does": first_sentence(part),
    }


def first_sentence(part: Any) -> str:
    """Return what a part does, from its docstring: the first line, or up to where its sentence ends."""
    text = " ".join(((part if isinstance(part, type) else type(part)).__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)\]])(?<!eq)\. |; ", text)[0].rstrip(".") + "."


def _value(value: Any) -> Any:
    """Return a part's value plainly; a part inside a part as its kind and values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = _choice(value)
        return {"kind": inner["kind"], **inner["values"]}
    return value


def choice_text(choice: dict[str, Any]) -> str:
    """Return one part as a line: its kind and its values."""
    values = ", ".join(f"{name}={value_text(value)}" for name, value in choice["values"].items())
    return f"{choice['kind']}({values})" if values else str(choice["kind"])


def value_text(value: Any) -> str:
    """Return a value as a user would type it, a part as `Kind(field=value)`."""
    value = _value(value)
    if isinstance(value, dict):
        inner = {name: item for name, item in value.items() if name != "kind"}
        return choice_text({"kind": value["kind"], "values": inner})
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(value_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def needs_text(entry: Entry) -> str:
    """Return in a few words what an objective asks of the trainer."""
    needs = entry.needs
    words = [
        ("reference policy", needs.reference),
        ("old entropy", needs.old_entropy),
        ("pass over the mini-batch", needs.mini_statistics),
    ]
    asked = [word for word, wanted in words if wanted]
    asked += ["critic"] if needs.critic else []
    asked += ["second policy"] if entry.objective.partner is not None else []
    asked += [f"scorer: {name}" for name in sorted(needs.scores) if name != "entropy"]
    return ", ".join(asked) or "rewards"
