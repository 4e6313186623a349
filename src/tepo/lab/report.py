"""report.html of a run or a study: the verdict first, then what it rests on; one file that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.core.files import write_text
from tepo.lab import sections
from tepo.lab.contrast import Contrast, Side, at_k, contrast, flips, sides_of_run, sides_of_study
from tepo.lab.evidence import Evidence, read_run, read_study
from tepo.lab.folder import StudyFolder
from tepo.lab.objective_diff import Diff, objective_diff
from tepo.lab.page import escape, pack, page, significant
from tepo.lab.verdict import accuracy_verdict
from tepo.training.metrics import MEANING

MOST_POINTS = 2_000
"""Points of a curve that are kept; longer runs show every n-th step."""
_MEANING = {
    "eval/avg": "share of right samples on held-out questions",
    "entropy/change": "mean change of a token's entropy since it was sampled (nats)",
    "clip/high": "fraction of tokens clipped above",
    "ratio/max": "largest importance ratio in the step",
}
"""Meanings that `MEANING` gives under a neighbouring name, or not at all."""
_NOT_CURVES = ("reward/timed_out",)


@dataclass(frozen=True)
class Material:
    """Everything a report is made of."""

    title: str
    verdicts: Sequence[str]
    further: Sequence[str]
    notes: Sequence[str]
    runs: Sequence[Evidence]
    variants: Sequence[str]
    sides: Sequence[Side]
    contrasts: Sequence[Contrast]
    results: Mapping[str, Any] | None
    command: str


def write_run_report(run: Path) -> Path:
    """Write report.html into the folder of a run, finished, running or crashed; return its path."""
    evidence = read_run(run)
    sides = sides_of_run(evidence)
    found = contrast(*sides) if len(sides) == 2 else None
    verdicts = [f"{evidence.name}: {evidence.said}."]
    if found is not None:
        verdicts.insert(0, accuracy_verdict("after", "before", found.effect))
    elif sides:
        effect = sides[0].accuracy
        if effect is not None:
            verdicts.insert(0, f"accuracy {sides[0].name}: {sections.effect_text(effect.to_json(), percent=True)}")
    material = Material(
        title=f"Run {evidence.name}",
        verdicts=verdicts,
        further=(),
        notes=_preflight_notes(evidence),
        runs=[evidence],
        variants=[evidence.variant],
        sides=sides,
        contrasts=[found] if found is not None else [],
        results=None,
        command=f"tepo train {run / 'config.toml'} --name {evidence.name}-again",
    )
    return _write(material, run / "report.html")


def write_report(study: Path) -> Path:
    """Write report.html into the folder of a study from its results.json and its runs; return its path."""
    folder = StudyFolder(study)
    if not folder.results.is_file():
        raise InputError(f"{study} has no results.json: run `tepo compare {folder.study}` first")
    results: dict[str, Any] = json.loads(folder.results.read_text(encoding="utf-8"))
    runs = read_study(study, results)
    variants = [variant["name"] for variant in results["variants"]]
    sides = sides_of_study(runs, variants)
    by_name = {side.name: side for side in sides}
    base = by_name.get(results["baseline"])
    pairs = [contrast(base, side) for side in sides if base is not None and side is not base]
    first = [one["verdicts"][0] for one in results["comparisons"] if one["verdicts"]]
    material = Material(
        title=f"Study {results['name']}",
        verdicts=first or ["There is nothing to compare yet."],
        further=[sentence for sentence in results["verdicts"] if sentence not in first],
        notes=results["notes"],
        runs=runs,
        variants=variants,
        sides=sides,
        contrasts=[pair for pair in pairs if pair is not None],
        results=results,
        command=f"tepo compare {folder.study}",
    )
    return _write(material, folder.report)


def _write(material: Material, path: Path) -> Path:
    runs_of = {name: [run for run in material.runs if run.variant == name] for name in material.variants}
    chosen = [next((run for run in runs if run.lines), None) for runs in runs_of.values()]
    first = [run for run in chosen if run is not None]
    diff = objective_diff([run.folder.path for run in first], [run.variant for run in first])
    data: dict[str, Any] = {"curves": curves_data(runs_of)}
    ranks = [found for side in material.sides if (found := at_k(side)) is not None]
    if any(len(found["pass"]) > 1 for found in ranks):
        data["at-k"] = ranks
    if material.contrasts:
        data["flips"] = [flips(one) for one in material.contrasts]
    if diff is not None:
        data["diff"] = {"index": diff.index, "responses": diff.responses}
    body = _body(material, runs_of, diff, asked=set(data))
    scripts = ("base.js", "tokens.js", "charts.js", "report.js")
    packed = {name: pack(value) for name, value in data.items()}
    write_text(path, page(title=material.title, body=body, scripts=scripts, data=packed))
    return path


def curves_data(runs_of: Mapping[str, Sequence[Evidence]]) -> dict[str, Any]:
    """Return every numeric metric of every run over steps, tokens and seconds of training, as plain values."""
    drawn = {name: [_curves(run) for run in runs if run.lines] for name, runs in runs_of.items()}
    names = {name for runs in drawn.values() for run in runs for name in run["values"]}
    known = [name for name in MEANING if name in names]
    metrics = known + sorted(names - set(known))
    meanings = {name: MEANING[name] for name in known} | _MEANING
    variants = [{"name": name, "runs": runs} for name, runs in drawn.items()]
    return {"variants": variants, "metrics": metrics, "meanings": meanings}


def _curves(run: Evidence) -> dict[str, Any]:
    seconds = list(accumulate(float(line.get("time/step") or 0.0) for line in run.lines))
    stride = -(-len(run.lines) // MOST_POINTS)
    # Lines with an evaluation stay: they are few, and each is a point of its own curve.
    kept = [at for at, line in enumerate(run.lines) if at % stride == 0 or "eval/avg" in line]
    lines = [run.lines[at] for at in kept]
    names = {name: None for line in lines for name, value in line.items() if _is_number(value)}
    skipped = ("step", "tokens", *_NOT_CURVES)
    return {
        "name": run.name,
        "seed": run.seed,
        "steps": [line["step"] for line in lines],
        "tokens": [line.get("tokens") for line in lines],
        "seconds": [significant(seconds[at], 6) for at in kept],
        "values": {name: [_short(line.get(name)) for line in lines] for name in names if name not in skipped},
    }


def _short(value: Any) -> float | None:
    return significant(float(value), 5) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _preflight_notes(run: Evidence) -> list[str]:
    """Return what the pre-flight expected, where there was one."""
    path = run.folder.path / "preflight.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        note = (
            f"Before the run: {found['pass_rate']:.0%} of {found['responses']} sampled responses right, "
            f"{found['signal']:.0%} of groups with a signal."
        )
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [note, *map(str, found.get("warnings", []))]


def _body(material: Material, runs_of: Mapping[str, Sequence[Evidence]], diff: Diff | None, *, asked: set[str]) -> str:
    empty = '<p class="dim">{}</p>'.format
    parts: list[tuple[str, str, Callable[[], str]]] = [
        ("curves", "Curves", lambda: '<div id="curves-box"></div>'),
        ("benchmark", "Held-out questions", lambda: sections.benchmark(material.sides, material.contrasts)),
        (
            "flips",
            "Questions that flipped",
            lambda: '<div id="flips-box"></div>' if "flips" in asked else empty("Nothing is compared yet."),
        ),
        (
            "at-k",
            "pass@k and maj@k",
            lambda: '<div id="at-k-box"></div>' if "at-k" in asked else empty("Needs several samples a question."),
        ),
        ("measures", "Measures", lambda: sections.measures(material.results) if material.results else ""),
        (
            "diff",
            "What each objective does to the same tokens",
            lambda: sections.diff(diff) if diff is not None else empty("No run kept responses (log.rollouts)."),
        ),
        ("health", "Health", lambda: sections.health(runs_of)),
        ("runs", "Runs", lambda: sections.runs(material.runs)),
        ("provenance", "Where this comes from", lambda: sections.provenance(material.runs, material.command)),
    ]
    written = [(key, title, markup) for key, title, make in parts if (markup := make())]
    links = " · ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in written)
    main = "\n".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>\n{markup}\n</section>' for key, title, markup in written
    )
    return f"""<header><h1>{escape(material.title)}</h1></header>
<main>
<div class="verdict">{"".join(f"<p>{escape(sentence)}</p>" for sentence in material.verdicts)}</div>
{sections.further(material.further)}
{sections.notes(material.notes)}
<p class="dim">{links}</p>
<noscript><p class="failure">Curves and tokens are drawn by this page's own script; tables are complete without.</p>
</noscript>
{main}
</main>
<footer>Written by tepo. This file is complete: it loads nothing and sends nothing.</footer>"""
