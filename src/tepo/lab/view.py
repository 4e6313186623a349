"""The token viewer: kept responses of a run as one HTML file, under several objectives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from tepo.core.errors import InputError
from tepo.core.files import write_text
from tepo.core.text import plain
from tepo.lab.page import escape, pack, page, significant
from tepo.lab.tokens import Inspection, inspect, read_step, token_batch
from tepo.objectives import Objective, TokenBatch, entry, objective, objectives
from tepo.training.config import ObjectiveConfig
from tepo.training.loading import read_toml

OTHERS = ("tepo", "grpo", "dapo", "gspo", "max-entropy")
"""Methods every viewer offers beside the run's own."""
MOST_RESPONSES = 10_000
LONGEST_TOKEN = 120
"""Characters of a token that are shown."""
CHUNK = 50
"""Responses packed together; the page unpacks only those it shows."""
_STEP_FILE = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True)
class Choice:
    """An objective to look through: a label for people, and a note on what was changed to make it computable."""

    name: str
    label: str
    objective: Objective
    note: str = ""


def write_view(
    run: Path, *, step: int | None = None, names: Sequence[str] = (), most: int = MOST_RESPONSES
) -> tuple[Path, str]:
    """Write view.html into a run's folder; return its path and what it holds, in words.

    `step`: that step alone. `names`: methods of the catalogue beside the run's own (`OTHERS` where none is named).
    At most `most` responses are shown, the last steps first to go in.
    """
    steps = kept_steps(run, step)
    chosen: list[tuple[int, list[dict[str, Any]]]] = []
    total = 0
    for number, path in reversed(steps):
        records = read_step(path)
        if not records:
            continue
        if chosen and total + len(records) > most:
            break
        chosen.append((number, records[:most]))
        total += len(chosen[-1][1])
    if not chosen:
        raise InputError(f"{run} holds no kept response: set log.rollouts above 0 in the run's configuration")
    chosen.reverse()
    left = len(steps) - len(chosen)
    methods = choices(run, names)
    index, chunks = view_data(chosen, methods)
    words = f"{total} responses of {len(chosen)} steps" + (f" ({left} steps left out)" if left else "")
    data = {"index": pack(index)} | {f"chunk-{number}": pack(chunk) for number, chunk in enumerate(chunks)}
    target = run / "view.html"
    body = _body(run, words)
    write_text(
        target, page(title=f"tokens of {run.name}", body=body, scripts=("base.js", "tokens.js", "view.js"), data=data)
    )
    return target, words


def kept_steps(run: Path, step: int | None = None) -> list[tuple[int, Path]]:
    """Return (step, file) of the kept responses of a run, in order; what is not there is an `InputError`."""
    if not (run / "config.toml").is_file() and not (run / "rollouts").is_dir():
        raise InputError(f"{run} is not a run: it has neither config.toml nor rollouts/")
    found = [
        (int(match[1]), path) for path in (run / "rollouts").glob("*") if (match := _STEP_FILE.fullmatch(path.name))
    ]
    steps = sorted(found)
    if step is None:
        return steps
    if step not in dict(steps):
        kept = f"kept are steps {steps[0][0]} to {steps[-1][0]}" if steps else "none is kept"
        raise InputError(f"{run} has no responses of step {step}: {kept}")
    return [(step, dict(steps)[step])]


def choices(run: Path, names: Sequence[str] = ()) -> list[Choice]:
    """Return the run's own objective first, then the named ones."""
    own = own_objective(run)
    wanted = [
        name for name in dict.fromkeys(names or OTHERS) if not (own is not None and own.objective == objective(name))
    ]
    return [*([own] if own is not None else []), *(named(name) for name in wanted)]


def own_objective(run: Path) -> Choice | None:
    """Return the objective a run was trained with, or None where its configuration does not say."""
    path = run / "config.toml"
    if not path.is_file():
        return None
    try:
        made = ObjectiveConfig.model_validate(read_toml(path).get("objective", {}))
        return Choice("run", f"{made.name} (as in the run)", made.build())
    except (InputError, ValidationError):
        return None


def named(name: str) -> Choice:
    """Return a method with its defaults; where it compares with a reference, that term is off.

    Runs do not record a reference policy's log-probs unless their own objective asked for them.
    """
    settings = {setting.name for setting in entry(name).settings}
    chosen = objective(name)
    if chosen.needs.reference and "kl_coef" in settings:
        without = objective(name, kl_coef=0.0)
        if not without.needs.reference:
            return Choice(name, f"{name} (kl_coef = 0)", without, "Its KL to the reference policy is left out.")
    return Choice(name, name, chosen)


def everything() -> list[Choice]:
    """Return every method of the catalogue."""
    return [named(item.name) for item in objectives()]


def attempt(method: Choice, batch: TokenBatch) -> tuple[Inspection | None, str]:
    """Return what a method does to a batch, or None and why it cannot be said."""
    try:
        return inspect(method.objective, batch), ""
    except InputError as error:
        return None, str(error)


def view_data(
    steps: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], methods: Sequence[Choice]
) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Return the viewer's index and its chunks of responses, as plain values.

    A step's kept responses are one mini-batch to each objective.
    """
    rows: dict[str, list[Any]] = {
        name: [] for name in ("step", "draw", "sample", "reward", "passed", "length", "stop", "error", "text", "prompt")
    }
    prompts: dict[tuple[str, str, str | None], int] = {}
    responses: list[dict[str, Any]] = []
    samples: dict[str, list[Tensor]] = {}
    why: dict[str, str] = {}
    able: set[str] = set()
    for number, records in steps:
        batch = token_batch(records)
        seen: dict[str, Inspection] = {}
        for method in methods:
            inspection, reason = attempt(method, batch)
            if inspection is None:
                why[method.name] = reason
            else:
                seen[method.name] = inspection
                able.add(method.name)
        for name, values in extents(batch, seen).items():
            samples.setdefault(name, []).append(values)
        for row, record in enumerate(records):
            asked = (
                str(record.get("problem", "")),
                plain(str(record.get("question", ""))),
                _words(record.get("answer")),
            )
            prompt = prompts.setdefault(asked, len(prompts))
            _add_row(rows, number, record, prompt)
            responses.append(response_data(record, row, seen))
    listed = [
        {
            "name": method.name,
            "note": method.note,
            "summary": _summary(method),
            "why": None if method.name in able else why.get(method.name, "not computed"),
        }
        for method in methods
    ]
    index = {
        "rows": rows,
        "prompts": [
            {"problem": plain(problem), "question": text, "answer": answer} for problem, text, answer in prompts
        ],
        "labels": {method.name: method.label for method in methods},
        "objectives": listed,
        "own": next((method.name for method in methods if method.name in able), methods[0].name if methods else ""),
        "scales": {name: scale(values) for name, values in samples.items()},
        "steps": [number for number, _ in steps],
        "chunk": CHUNK,
    }
    return index, [responses[start : start + CHUNK] for start in range(0, len(responses), CHUNK)]


def response_data(record: Mapping[str, Any], row: int, seen: Mapping[str, Inspection]) -> dict[str, Any]:
    """Return one response as the pages read it: short keys, one number where all tokens have the same."""
    size = len(record["token_ids"])
    names = {
        "lp": "logp",
        "olp": "old_logp",
        "e": "entropy",
        "oe": "old_entropy",
        "rlp": "rollout_logp",
        "adv": "advantage",
    }
    if "old_logp" not in record and "logp" in record:
        names |= {"olp": "logp", "oe": "entropy"}  # one update a step: the old policy is the current one
    fields = {key: squeezed(record[name]) for key, name in names.items() if name in record}
    tokens = record.get("tokens") or [str(token) for token in record["token_ids"]]
    return {
        "t": [shown_token(token) for token in tokens],
        **fields,
        "o": {name: inspection_data(inspection, row, size) for name, inspection in seen.items()},
    }


def inspection_data(inspection: Inspection, row: int, size: int) -> dict[str, Any]:
    """Return an objective's share of a response: credit, entropy credit, advantage, ratio, weight, flags."""
    fields = {
        "c": inspection.credit,
        "ec": inspection.entropy_credit,
        "a": inspection.advantage,
        "r": inspection.ratio,
        "w": inspection.weight,
    }
    found: dict[str, Any] = {key: squeezed(value[row, :size]) for key, value in fields.items() if value is not None}
    flags = inspection.flags[row, :size].tolist()
    return found | {"f": flags[0] if len(set(flags)) == 1 else flags}


def extents(batch: TokenBatch, seen: Mapping[str, Inspection]) -> dict[str, Tensor]:
    """Return the sizes of every quantity on the tokens of a batch, from which colour scales are made."""
    mask = batch.mask
    old = batch.logp if batch.old_logp is None else batch.old_logp
    gap = (old - batch.logp)[mask]
    found = {"ratio": gap.abs(), "kl": torch.expm1(gap.clamp(max=20)) - gap, "surprise": batch.logp[mask].abs()}
    if batch.entropy is not None:
        found["entropy"] = batch.entropy[mask]
        if batch.old_entropy is not None:
            found["entropy-change"] = (batch.entropy - batch.old_entropy)[mask].abs()
    if batch.rollout_logp is not None:
        found["mismatch"] = (batch.rollout_logp - old)[mask].abs()
    for name, one in seen.items():
        own = {
            "credit": one.credit,
            "entropy-credit": one.entropy_credit,
            "advantage": one.advantage,
            "weight": one.weight,
        }
        found |= {f"{name}/{key}": value[mask].abs() for key, value in own.items() if value is not None}
        found[f"{name}/objective-ratio"] = one.ratio[mask].clamp_min(1e-9).log().abs()
    return {name: value.detach().double() for name, value in found.items()}


def scale(values: Iterable[Tensor]) -> float:
    """Return the value at which colours are full: the 98th percentile of the sizes above 0, so that few outliers do
    not wash out the rest."""
    every = torch.cat(list(values))
    every = every[torch.isfinite(every) & (every > 1e-12)]
    if not every.numel():
        return 1.0
    place = max(0, min(every.numel() - 1, round(0.98 * every.numel()) - 1))
    return significant(float(every.sort().values[place]), 2) or 1.0


def squeezed(values: Sequence[float] | Tensor) -> Any:
    """Return numbers to four significant digits, None for what is not finite; one number where all are the same."""
    exact = np.asarray(values, dtype=np.float64)
    if not exact.size:
        return []
    if (exact == exact[0]).all():
        return significant(float(exact[0]))
    whole = np.isfinite(exact)
    used = np.where(whole, exact, 0.0)
    powers = 10.0 ** (3 - np.floor(np.log10(np.maximum(np.abs(used), 1e-300))))
    short: list[float] = (np.rint(used * powers) / powers).tolist()
    return short if whole.all() else [value if fine else None for value, fine in zip(short, whole, strict=True)]


def _add_row(rows: dict[str, list[Any]], step: int, record: Mapping[str, Any], prompt: int) -> None:
    reward = record.get("reward")
    values = {
        "step": step,
        "draw": record.get("draw", 0),
        "sample": record.get("sample", 0),
        "reward": None if reward is None else significant(float(reward)),
        "passed": bool(record.get("passed")),
        "length": len(record["token_ids"]),
        "stop": plain(str(record.get("stop_reason", ""))),
        "error": _words(record.get("error")),
        "text": plain(str(record.get("response", ""))),
        "prompt": prompt,
    }
    for name, value in values.items():
        rows[name].append(value)


@lru_cache(maxsize=65_536)  # most tokens of a run are the same few thousand texts
def shown_token(token: str) -> str:
    """Return a token's text made harmless and, where a vocabulary has absurd ones, short."""
    text = plain(token)
    return text if len(text) <= LONGEST_TOKEN else f"{text[:LONGEST_TOKEN]}… ({len(text) - LONGEST_TOKEN} more)"


def _words(value: object) -> str | None:
    return None if value is None else plain(str(value))


def _summary(method: Choice) -> str:
    try:
        return entry(method.objective.name).summary
    except InputError:
        return ""


def _body(run: Path, words: str) -> str:
    return f"""<header><h1>Tokens of {escape(run.name)}</h1></header>
<main>
<p class="dim">{escape(words)}. Hover, tap, or focus a line and use the arrow keys to see a token's values;
<kbd>/</kbd> searches, <kbd>n</kbd> and <kbd>p</kbd> turn pages. An underline says above zero, a wavy one below.
Credit is what pushes a token: −d loss / d log-prob, with the kept responses of a step as one mini-batch, so its size
differs from the run's own by the share of responses that were kept; a group kept in part is judged by that part.</p>
<div class="controls" id="controls"></div>
<div id="legend"></div>
<div class="bar-row"><span id="count" role="status"></span><nav class="pages" aria-label="pages"></nav></div>
<noscript><p class="failure">This page draws its responses with a script of its own.</p></noscript>
<section id="responses" aria-label="responses"></section>
<div class="bar-row"><span></span><nav class="pages" aria-label="pages, below"></nav></div>
</main>
<footer>Written by tepo. This file is complete: it loads nothing and sends nothing.</footer>"""
