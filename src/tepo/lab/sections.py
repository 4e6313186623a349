"""The parts of a report that are words and tables, as markup. Every text goes through `escape`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tepo.lab.contrast import Contrast, Side
from tepo.lab.evidence import Evidence
from tepo.lab.folder import DONE
from tepo.lab.health import UNKNOWN, lights
from tepo.lab.objective_diff import Diff, Row
from tepo.lab.page import escape
from tepo.training.toml import dump_toml

_SIGNS = {"good": "● good", "fair": "▲ fair", "bad": "■ bad", UNKNOWN: "– not recorded"}
_RUN_KEYS = ("name", "runs", "train.seed", "model.threads")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, name: str = "", numbers_from: int = 1) -> str:
    """Return a table; cells are markup already. Columns from `numbers_from` on hold numbers."""
    kinds = ["" if column < numbers_from else ' class="n"' for column in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for kind, cell in zip(kinds, head, strict=True))
    lines = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    named = f' data-name="{escape(name)}"' if name else ""
    return f'<div class="wide"><table{named}><thead><tr>{top}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def effect_text(effect: Mapping[str, Any] | None, *, percent: bool = False, signed: bool = False) -> str:
    """Return a number with its interval, as text; an absent one is a dash."""
    if effect is None or effect.get("value") is None:
        return "–"

    def word(value: float) -> str:
        form = ("+" if signed else "") + (".1f" if percent else ".3g")
        return format(100 * value if percent else value, form).replace("-", "−")

    unit = " %" if percent and not signed else ""
    if effect.get("low") is None or effect.get("high") is None:
        return f"{word(effect['value'])}{unit} (no interval)"
    return f"{word(effect['value'])}{unit} [{word(effect['low'])}, {word(effect['high'])}]"


def notes(texts: Sequence[str]) -> str:
    """Return remarks as a list."""
    if not texts:
        return ""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def further(texts: Sequence[str]) -> str:
    """Return the verdicts beyond the first of each comparison, folded."""
    if not texts:
        return ""
    return f"<details><summary>Further comparisons: {len(texts)}</summary>{notes(texts)}</details>"


def benchmark(sides: Sequence[Side], contrasts: Sequence[Contrast]) -> str:
    """Return the table of accuracies with paired differences and flipped questions."""
    if not sides:
        return '<p class="dim">No evaluation is on record yet.</p>'
    against = {one.second.name: one for one in contrasts}
    rows = []
    for side in sides:
        found = against.get(side.name)
        effect = side.accuracy
        rows.append(
            [
                escape(side.name),
                str(len(side.evaluations)),
                str(len(side.evaluations[0].questions)),
                escape(effect_text(effect.to_json() if effect is not None else None, percent=True)),
                escape(effect_text(found.effect.to_json(), percent=True, signed=True)) if found is not None else "–",
                f'<a href="#flips">{found.better} better, {found.worse} worse</a>' if found is not None else "–",
            ]
        )
    base = contrasts[0].first.name if contrasts else "the first"
    head = ("", "seeds", "questions", "accuracy, 95 %", f"minus {base}, points, paired", "questions flipped")
    words = (
        "Intervals are over questions, and over seeds where there are several (a crossed design). Differences are "
        "paired: the same questions, and the same seeds."
    )
    return table(head, rows, name="benchmark") + f'<p class="dim">{words}</p>'


def measures(results: Mapping[str, Any]) -> str:
    """Return the study's other figures: each variant's own, and its differences from the baseline."""
    kinds = {
        "final_reward": "reward at the end",
        "entropy_kept": "share of entropy kept",
        "worst_drop": "worst drop of reward",
        "area_steps": "mean reward over steps",
        "area_tokens": "mean reward over tokens",
        "area_seconds": "mean reward over seconds",
        "improvement": "probability of improvement",
    }
    compared = {one["variant"]: one for one in results["comparisons"]}
    variants = results["variants"]
    head = [
        "measure",
        *(variant["name"] for variant in variants),
        *(f"{name} − {results['baseline']}" for name in compared),
    ]
    rows = []
    for key, words in kinds.items():
        own = [escape(effect_text(variant.get(key))) for variant in variants]
        gaps = [escape(effect_text(one.get(key), signed=key != "improvement")) for one in compared.values()]
        if any(cell != "–" for cell in (*own, *gaps)):
            rows.append([words, *own, *gaps])
    for key, words in (("finished", "finished runs"), ("spikes", "gradient spikes"), ("collapsed", "collapsed runs")):
        rows.append([words, *(str(variant.get(key, "–")) for variant in variants), *("–" for _ in compared)])
    for number, time in enumerate(next((variant["times"] for variant in variants if variant.get("times")), [])):
        label = f"median {time['axis']} to {time['metric']} {time['threshold']:g}"
        own = []
        for variant in variants:
            times = variant.get("times") or []
            value = times[number]["median"] if number < len(times) else None
            own.append("not reached" if value is None else f"{value:,.0f}")
        ratios = [_ratio(one, time) for one in compared.values()]
        rows.append([escape(label), *own, *ratios])
    rules = "".join(f"<li>{escape(name)}: {escape(rule)}</li>" for name, rule in results["rules"].items())
    extra = f"<details><summary>How these are measured</summary><ul>{rules}</ul></details>"
    return table(head, rows, name="measures") + extra


def _ratio(comparison: Mapping[str, Any], time: Mapping[str, Any]) -> str:
    """Return the ratio of times to a threshold, as markup."""
    for one in comparison.get("times", []):
        if (one["metric"], one["axis"], one["threshold"]) == (time["metric"], time["axis"], time["threshold"]):
            return "–" if one["ratio"] is None else f"× {escape(effect_text(one['ratio']))}"
    return "–"


def diff(found: Diff) -> str:
    """Return the table of what every objective does to the frozen batch, and the place of the token maps."""
    words = (
        f"The batch: {found.where}. Credit is −d loss / d log-prob. Push up and down: its sums above and below zero; "
        "on right responses: the share of its size there; agreement: its correlation over tokens with the first line; "
        "through entropy: the size of −d loss / d entropy. Every method at the start of its state."
    )
    shown = [one for one in found.catalogue if not _unsaid(one)]
    others = [one for one in (*found.own, *found.catalogue) if _unsaid(one)]
    parts = [f'<p class="dim">{escape(words)}</p><div id="diff-box"></div>']
    parts.append(_diff_table([one for one in found.own if not _unsaid(one)], "objectives"))
    parts.append(
        f"<details><summary>The same for {len(shown)} methods of the catalogue</summary>"
        f"{_diff_table(shown, 'catalogue')}</details>"
    )
    if others:
        rows = [[escape(one.label), f"not applicable: {escape(one.why)}"] for one in others]
        missing = table(("objective", "why it is not shown"), rows, numbers_from=2)
        parts.append(
            f"<details><summary>{len(others)} that need what the run did not record</summary>{missing}</details>"
        )
    return "".join(parts)


def _unsaid(row: Row) -> bool:
    """Return whether nothing at all can be said of a method on the batch."""
    return bool(row.why) and row.through_entropy is None


def _diff_table(rows: Sequence[Row], name: str) -> str:
    if not rows:
        return ""

    def share(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    def plain_number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form).replace("-", "−")

    lines = []
    for one in rows:
        numbers = [share(one.clipped), share(one.masked), share(one.left_out)]
        numbers += [plain_number(one.up, ".3g"), plain_number(one.down, ".3g"), share(one.right)]
        numbers += [plain_number(one.agreement, ".2f"), plain_number(one.through_entropy, ".3g")]
        note = f'<br><span class="dim">not applicable: {escape(one.why)}</span>' if one.why else ""
        lines.append([escape(one.label) + note, *numbers])
    head = (
        *("objective", "clipped", "under the mask", "not chosen", "push up", "push down", "on right responses"),
        *("agreement", "through entropy"),
    )
    return table(head, lines, name=name)


def health(runs_of: Mapping[str, Sequence[Evidence]]) -> str:
    """Return the traffic lights: the worst run of each variant under every rule."""
    columns = {name: lights(runs) for name, runs in runs_of.items() if any(run.lines for run in runs)}
    if not columns:
        return '<p class="dim">No step is on record yet.</p>'
    rows = []
    for number, (rule, _) in enumerate(next(iter(columns.values()))):
        cells = []
        for found in columns.values():
            light = found[number][1]
            kind = light.status if light.status != UNKNOWN else "dim"
            cells.append(f'<span class="badge {kind}">{_SIGNS[light.status]}</span> {escape(light.value)}')
        rows.append([escape(rule.name), *cells, f'<span class="dim">{escape(rule.words)}</span>'])
    words = (
        "The worst run of each, judged on the last fifth of its steps. A light says where to look; it proves nothing."
    )
    head = ("signal", *columns, "rule")
    return table(head, rows, name="health", numbers_from=len(head)) + f'<p class="dim">{words}</p>'


def runs(found: Sequence[Evidence]) -> str:
    """Return every run with how it ended; what failed comes first and is never left out."""
    ordered = sorted(found, key=lambda run: run.status == DONE)
    rows = []
    for run in ordered:
        first, *rest = run.said.split("\n")
        mark = "✓" if run.status == DONE else "✗"
        kind = "right" if run.status == DONE else "wrong"
        said = f'<span class="badge {kind}">{mark}</span> {escape(first)}'
        if rest:
            said += f"<pre>{escape(chr(10).join(rest))}</pre>"
        seconds = sum(float(line.get("time/step") or 0.0) for line in run.lines)
        tokens = run.lines[-1].get("tokens", 0) if run.lines else 0
        rows.append([escape(run.name), said, str(run.seed), f"{tokens:,}", f"{seconds / 60:,.1f}"])
    return table(("run", "how it ended", "seed", "response tokens", "minutes"), rows, name="runs", numbers_from=2)


def provenance(found: Sequence[Evidence], command: str) -> str:
    """Return the command to repeat, where the runs were made, and the settings in which they differ."""
    parts = [f"<p>To repeat it:</p><pre>{escape(command)}</pre>"]
    known = [run for run in found if run.config]
    if not known:
        return "".join(parts)
    first = known[0]
    made = [(key, value) for key, value in _flat(first.provenance).items()]
    rows = [[escape(key), escape(value)] for key, value in made]
    parts.append(table(("made with", ""), rows, numbers_from=2))
    flats = [_flat(run.config) for run in known]
    keys = sorted({key for flat in flats for key in flat if key not in _RUN_KEYS})
    differing = [key for key in keys if len({str(flat.get(key)) for flat in flats}) > 1]
    if differing:
        by_variant = {run.variant: flat for run, flat in zip(known, flats, strict=True)}
        lines = [[escape(key), *(escape(flat.get(key, "–")) for flat in by_variant.values())] for key in differing]
        parts.append("<h3>Settings that differ</h3>")
        parts.append(table(("setting", *by_variant), lines, name="settings", numbers_from=99))
    text = dump_toml(dict(first.config))
    parts.append(
        f"<details><summary>Configuration of {escape(first.name)}</summary><pre>{escape(text)}</pre></details>"
    )
    return "".join(parts)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a tree's leaves by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
