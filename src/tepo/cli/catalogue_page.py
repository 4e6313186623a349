"""docs/objectives.md, made from the catalogue: every method, every setting, every part."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo.objectives import DecodingOption, Described, Entry
    from tepo.objectives.method import Setting

_INTRODUCTION = """\
# Objectives

<!-- Made from the catalogue by `make docs`; edit the sources in src/tepo/objectives instead. -->

{count} methods, each a composition of the same few parts, and what the family does while decoding. `tepo explain NAME`
shows one, `tepo explain NAME --versus OTHER` what differs between two, `--latex` the formulas in LaTeX. *confirmed*:
read in the paper or its authors' code; *inferred*: reconstructed, and every such choice is a setting; *experimental*:
our reading where the public record has no exact formula.

In a run: `[objective] name = "dapo"`, settings beside the name. In Python: `tepo.objective("dapo", clip_high=0.3)`.
"""

_COMPOSING = """\
## Composing a new one

A method with some of its parts replaced, in a run's TOML (`examples/composed.toml` is a whole one):

```toml
[objective]
name = "mine"                                      # any name
base = "dapo"                                      # what is not replaced is the base's
clip_high = 0.3                                    # its settings, as ever
ratio = {{ part = "SequenceRatio" }}

[[objective.regularizers]]                         # a list replaces the base's whole list
part = "KL"
coef = 0.1
mask = {{ part = "FallingEntropy" }}
```

or in Python, where a part may also be an object of a class of your own (`examples/composed.py`):

```python
from tepo.objectives import KL, FallingEntropy, SequenceRatio, compose
from tepo.testing import check_objective

mine = compose("dapo", {{"ratio": SequenceRatio(), "regularizers": [KL(0.1, mask=FallingEntropy())]}}, name="mine")
check_objective(mine)          # padding, row order and the split into micro-batches change nothing
```

"none" is the value of a field that may be unset. These are the parts, by the place they fit in:

{parts}
"""

_PLACES = {
    "Shaping": "`shaping` (a list): what is a response worth",
    "Advantage": "`advantage`: how much better than its group",
    "Transform": "`transforms` (a list): how credit is spread over tokens",
    "Ratio": "`ratio`: the new policy over the old one, and at which level",
    "Surrogate": "`surrogate`: what a step may gain",
    "Selector": "`selectors` (a list): which tokens carry the policy term",
    "ImportanceWeight": "`weight`: the scorer over the sampler",
    "RowWeight": "`row_weight`: which responses count more",
    "Regularizer": "`regularizers` (a list): what holds the policy back",
    "Reducer": "`reducer`: who is averaged over whom",
    "TokenMask": "`mask` of a `KL`: which tokens it holds back",
    "Tuner": "`tuner` of a `TemperedEntropy`: how its coefficient follows the entropy",
}


def page(entries: Sequence[Entry], options: Sequence[DecodingOption]) -> str:
    """Return the page as Markdown."""
    shared = shared_settings(entries)
    listed: list[Described] = [*entries, *options]
    rows = [
        (f"[`{item.name}`](#{anchor(item.name)})", str(item.paper.year), item.status, item.summary) for item in listed
    ]
    sections = [
        _INTRODUCTION.format(count=len(entries)),
        table(("method", "year", "status", "what it is"), rows),
        "## Settings of every method\n\nUnless its own table says otherwise.\n\n" + settings_table(shared),
        *(section(entry, shared) for entry in entries),
        *(option_section(option) for option in options),
        _COMPOSING.format(parts=vocabulary()),
    ]
    return "\n".join(text.strip("\n") + "\n" for text in sections)


def anchor(name: str) -> str:
    """Return the anchor of a heading that is a method's name in code, as Markdown renderers make it."""
    return "".join(character for character in name if character.isalnum() or character in "-_")


def shared_settings(entries: Sequence[Entry]) -> tuple[Setting, ...]:
    """Return the settings that most methods have, with the same default and help."""
    counts = Counter(setting for entry in entries for setting in entry.settings)
    return tuple(setting for setting, count in counts.items() if 2 * count > len(entries))


def section(entry: Entry, shared: Sequence[Setting]) -> str:
    """Return one method's section."""
    from tepo.cli.objectives import choice_text, needs_text, parts

    composed = [
        (f"`{place}`", f"`{choice_text(choice)}`", choice["does"])
        for place, choices in parts(entry).items()
        for choice in choices
        if choice["kind"] not in ("NoWeight", "EvenRows")
    ]
    own = [setting for setting in entry.settings if setting not in shared]
    return "\n".join(
        [
            *_head(entry),
            f"Needs: {needs_text(entry)}.\n",
            table(("part", "choice", "what it does"), composed),
            *([settings_table(own)] if own else []),
        ]
    )


def option_section(option: DecodingOption) -> str:
    """Return one decoding option's section."""
    switch = f"It has no loss. In a run or an evaluation: `{option.switch}`; settings go into `[{option.section}]`.\n"
    return "\n".join([*_head(option), switch, settings_table(option.settings)])


def _head(item: Described) -> list[str]:
    """Return the beginning of a section: what it is, its status, paper and formula."""
    paper = item.paper
    where = f"[arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})" if paper.arxiv else ""
    source = ", ".join(filter(None, [paper.venue, where, str(paper.year)]))
    return [
        f"## `{item.name}`\n",
        f"{item.summary} *{item.status}*. {paper.title} ({source}).\n",
        f"```\n{item.formula}\n```\n",
        *([f"{item.notes}\n"] if item.notes else []),
    ]


def settings_table(settings: Sequence[Setting]) -> str:
    """Return a table of settings: default, type, what it does, source, and how sure that is where it is not."""
    from tepo.cli.objectives import value_text

    rows = [
        (
            f"`{item.name}`",
            f"`{value_text(item.default)}`",
            item.type,
            item.help,
            item.source if item.status == "confirmed" else f"*{item.status}*: {item.source}",
        )
        for item in settings
    ]
    return table(("setting", "default", "type", "what it does", "source"), rows)


def vocabulary() -> str:
    """Return the parts by place, with their fields."""
    from tepo.cli.objectives import first_sentence
    from tepo.objectives.composition import PARTS

    texts = []
    for place, kinds in PARTS.items():
        rows = [(f"`{kind.__name__}`", _fields(kind), first_sentence(kind)) for kind in kinds]
        texts.append(f"### {_PLACES[place.__name__]}\n\n{table(('part', 'fields', 'what it does'), rows)}")
    return "\n".join(texts)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines: list[Sequence[str]] = [columns, ["---"] * len(columns)]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _fields(kind: Any) -> str:
    """Return the fields of a part: name, type, and default where it has one."""
    from tepo.cli.objectives import value_text
    from tepo.objectives.catalogue import words

    hints = typing.get_type_hints(kind)
    texts = []
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else f" = {value_text(field.default)}"
        texts.append(f"`{field.name}`: {words(hints[field.name])}{default}")
    return ", ".join(texts)
