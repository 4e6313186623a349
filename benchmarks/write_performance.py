"""Put results into docs/performance.md: `python benchmarks/write_performance.py benchmarks/results/*.json`.

The results of a benchmark replace what stands between its own marks, `<!-- step: begin -->` and `<!-- step: end -->`;
the newest one describes the machine. Results of `--quick` are refused: their times mean nothing.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tables import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def put(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of that name."""
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    between = re.compile(f"{re.escape(marks[0])}.*{re.escape(marks[1])}", re.DOTALL)
    if not between.search(page):
        raise SystemExit(f"{PAGE.name} has no place for {name}: expected the marks {marks[0]} and {marks[1]}")
    return between.sub(lambda _: f"{marks[0]}\n{text}\n{marks[1]}", page)


def machine(content: dict[str, Any]) -> str:
    """Describe the machine of a result."""
    about = content["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return "\n".join(
        [
            f"{about['processor']}, {about['cores']} cores, {about['memory_gib']:.0f} GiB, {about['system']}; "
            f"instructions: {', '.join(about['instructions']) or 'unknown'}.",
            f"Python {about['python']}; {packages}. Threads: {about['threads']}. Load before the first and after the "
            f"last measurement: {about['load_at_start']:.1f} and {about['load_at_end']:.1f}.",
        ]
    )


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of one benchmark, run in parts, as one; of a case measured twice the later stays."""
    results = sorted(results, key=lambda content: content["made"])
    cases = {case["case"]: case for content in results for case in content["cases"]}
    notes = dict.fromkeys(note for content in results for note in content["notes"])
    commands = "`, `".join(dict.fromkeys(content["command"] for content in results))
    return results[-1] | {"cases": list(cases.values()), "notes": list(notes), "command": commands}


def write(page: str, results: list[dict[str, Any]]) -> str:
    """Return the page with every result in its place."""
    for name in dict.fromkeys(content["benchmark"] for content in results):
        page = put(page, name, markdown(joined([content for content in results if content["benchmark"] == name])))
    newest = max(results, key=lambda content: content["made"])
    return put(page, "machine", machine(newest))


def main(arguments: list[str]) -> None:
    results = [json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments]
    if not results:
        raise SystemExit(__doc__)
    for name, content in zip(arguments, results, strict=True):
        if content["quick"]:
            raise SystemExit(f"{name} is a result of --quick, whose times mean nothing; run the benchmark without it")
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
