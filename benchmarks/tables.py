"""Results as tables: on the screen, and in Markdown for docs/performance.md."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]
HEAD = ("case", "side", "time", "tokens/s", "peak", "peer / ours: time", "per token", "memory", "floor", "share")


def duration(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def ratio(found: Result | None) -> str:
    """Return a ratio with its spread."""
    return "" if found is None else f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def rows(case: Result) -> list[tuple[str, ...]]:
    """Return the lines of one case, one a side, the sides that did not run last."""
    lines = []
    for index, (name, side) in enumerate(case["sides"].items()):
        against = case["ratios"].get(name, {})
        peak = side.get("extra_mb") or side.get("peak_mb")
        floor = case.get("floor", {}).get("seconds")
        speed = side.get("tokens_per_s")
        lines.append(
            (
                case["case"] if index == 0 else "",
                name,
                duration(side["seconds"]["median"]) if "seconds" in side else "",
                f"{speed['median']:,.0f}" if speed else "",
                f"{peak['median']:,.0f} MiB" if peak else "",
                ratio(against.get("seconds")),
                ratio(against.get("seconds_per_token")),
                ratio(against.get("extra_mb") or against.get("peak_mb")),
                duration(floor) if floor and index == 0 else "",
                f"{100 * floor / side['seconds']['median']:.0f} %" if floor and index == 0 else "",
            )
        )
    return lines + [("", name, "not run", "", "", "", "", "", "", "") for name in case["skipped"]]


def used(lines: list[tuple[str, ...]]) -> list[int]:
    """Return the columns in which anything stands."""
    return [column for column in range(len(HEAD)) if any(line[column] for line in lines)]


def console(content: Result) -> None:
    """Print a result as a table."""
    from rich.console import Console
    from rich.table import Table

    lines = [line for case in content["cases"] for line in rows(case)]
    columns = used(lines)
    table = Table(title=content["benchmark"])
    for column in columns:
        table.add_column(HEAD[column], justify="left" if column < 2 else "right", no_wrap=column > 1)
    for line in lines:
        table.add_row(*(line[column] for column in columns))
    screen = Console(width=None if Console().is_terminal else 200)
    screen.print(table)
    for case in content["cases"]:
        for name, why in case["skipped"].items():
            screen.print(f"{case['case']}: {name} did not run: {why}", markup=False)
    for note in content["notes"]:
        screen.print(note, markup=False)


def markdown(content: Result) -> str:
    """Return a result as a Markdown table with its command, notes and what did not run."""
    lines = [line for case in content["cases"] for line in rows(case)]
    columns = used(lines)

    def row(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    made = content["made"][:10]
    text = [f"`{content['command']}` ({made})", ""]
    text += [row([HEAD[column] for column in columns]), row(["---" if c < 2 else "---:" for c in columns])]
    text += [row([line[column] for column in columns]) for line in lines]
    skipped = {f"- {name}: {why}" for case in content["cases"] for name, why in case["skipped"].items()}
    remarks = [f"- {note}" for note in content["notes"]] + sorted(skipped)
    return "\n".join([*text, *(["", *remarks] if remarks else [])])
