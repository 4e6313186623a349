"""Run folders made up without training: numbers from a seed, responses as hostile as asked for."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tepo.core.files import write_text
from tepo.evaluation import Evaluation, QuestionResult, SampleResult
from tepo.lab.config import StudyConfig
from tepo.lab.folder import DONE, FAILED, StudyFolder
from tepo.lab.study import write_results
from tepo.training.loading import check_config
from tepo.training.rundir import RunFolder, write_config
from tepo.training.toml import dump_toml

HOSTILE = (
    "<script>document.title = 'owned'</script>",
    "</script><script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\x1b[2J\x1b]0;owned\x07 cleared",
    "<!--<script>",
    "]]></style><svg onload=alert(1)>",
    "{{7*7}} ${7*7} &lt;b&gt; & \"quoted\" 'single'",
    "right-to-left \u202edetrevni\u202c and a surrogate \ud800",
    "javascript:alert(1) [link](javascript:alert(1))",
    "=cmd|' /C calc'!A0",
)


def make_run(
    path: Path,
    *,
    objective: str = "tepo",
    seed: int = 0,
    steps: int = 12,
    planned: int | None = None,
    responses: int = 8,
    texts: Sequence[str] = (),
    evaluations: bool = True,
    gain: float = 0.3,
    length: int = 6,
    rollouts_every: int = 1,
) -> Path:
    """Write a run of `steps` steps, `planned` of them asked for; `texts` are questions, responses and tokens in it."""
    config = check_config(
        {
            "name": path.name,
            "model": {"path": "builtin:tiny"},
            "task": {"source": "arithmetic"},
            "objective": {"name": objective},
            "train": {"steps": planned or steps, "seed": seed},
        },
        source="a test",
    )
    folder = RunFolder(path)
    for part in (path, folder.rollouts, folder.eval, folder.checkpoints):
        part.mkdir(parents=True, exist_ok=True)
    write_config(folder, config, provenance())
    draw = random.Random(f"{seed} {objective}")
    if evaluations:
        evaluation(draw, 0.3, texts).write(folder.eval / "step-000000.jsonl")
        evaluation(draw, 0.3 + gain, texts).write(folder.eval / f"step-{steps:06d}.jsonl")
        folder.append_metrics(0, {"eval/avg": 0.3, "eval/avg_low": 0.2, "eval/avg_high": 0.4, "time/step": 0.0})
    for step in range(1, steps + 1):
        folder.append_metrics(step, metrics(draw, step / steps, step, gain))
        if step % rollouts_every:
            continue
        records = [record(draw, step, row, texts, length) for row in range(responses)]
        write_text(folder.rollouts / f"step-{step:06d}.jsonl", "".join(json.dumps(one) + "\n" for one in records))
    if planned is None:
        folder.model.mkdir()
        (folder.model / "config.json").write_text("{}")
    return path


def provenance() -> dict[str, Any]:
    return {"started": "2026-01-01T00:00:00+00:00", "command": "tepo train run.toml", "python": "3.11", "device": "cpu"}


def metrics(draw: random.Random, part: float, step: int, gain: float) -> dict[str, Any]:
    return {
        "reward/mean": 0.3 + gain * part + draw.gauss(0, 0.03),
        "reward/errors": 0,
        "group/signal": 0.6,
        "length/mean": 40 + draw.gauss(0, 2),
        "length/truncated": 0.02,
        "entropy/rollout": math.exp(-part) + draw.gauss(0, 0.01),
        "entropy/change": -0.01,
        "mask/kl": 0.2 + draw.gauss(0, 0.02),
        "kl/old": abs(draw.gauss(0.002, 0.001)),
        "ratio/max": 1.4 + abs(draw.gauss(0, 0.2)),
        "clip/low": 0.02,
        "clip/high": 0.03,
        "mismatch/logp": 1e-4,
        "grad/norm": 1 + abs(draw.gauss(0, 0.2)),
        "update/skipped": 0.0,
        "tokens": step * 1000,
        "time/step": 2.0 + draw.random(),
    }


def record(draw: random.Random, step: int, row: int, texts: Sequence[str], length: int) -> dict[str, Any]:
    size = draw.randint(1, length)
    tokens = [draw.choice([*texts, " the", " 4", "\n", "8"]) for _ in range(size)]
    passed = row % 4 in (0, 3)
    old = [-draw.expovariate(1.0) for _ in tokens]
    entropy = [draw.random() for _ in tokens]
    return {
        "draw": step * 10 + row // 4,
        "sample": row % 4,
        "problem": f"made/{row // 4}",
        "question": texts[row % len(texts)] if texts else f"{row // 4} + {step}",
        "answer": "4",
        "response": "".join(tokens),
        "reward": 1.0 if passed else 0.0,
        "passed": passed,
        "parts": {"numeric": 1.0},
        "error": texts[0] if texts and row == 1 else None,
        "stop_reason": "length" if row == 2 else "eos",
        "prompt_ids": [1],
        "token_ids": list(range(size)),
        "tokens": tokens,
        "rollout_logp": old,
        "rollout_entropy": entropy,
        "old_logp": old,
        "old_entropy": entropy,
        "logp": [value + draw.gauss(0, 0.2) for value in old],
        "entropy": [max(0.0, value + draw.gauss(0, 0.1)) for value in entropy],
        "advantage": [1.0 if passed else -1.0] * size,
    }


def evaluation(draw: random.Random, accuracy: float, texts: Sequence[str], *, samples: int = 4) -> Evaluation:
    questions = []
    for number in range(30):
        text = texts[number % len(texts)] if texts else f"question {number}"
        chance = min(1.0, max(0.0, accuracy + draw.gauss(0, 0.2)))
        results = [sample(f"{text} answered {index}", draw.random() < chance) for index in range(samples)]
        questions.append(QuestionResult(f"q{number}", text, "4", tuple(results)))
    return Evaluation(tuple(questions), {"policy": "made"})


def sample(text: str, passed: bool) -> SampleResult:
    answer = "4" if passed else str(len(text))
    return SampleResult(text=text, score=float(passed), passed=passed, answer=answer, length=9, stop_reason="eos")


def make_study(
    path: Path, *, variants: Sequence[str] = ("grpo", "tepo"), seeds: int = 3, failed: str = "", **settings: Any
) -> Path:
    """Write the runs of a study and analyse them; `failed` is the error of one more seed of the last variant."""
    base = {"model": {"path": "builtin:tiny"}, "task": {"source": "arithmetic"}, "train": {"steps": 12}}
    every = seeds + bool(failed)
    study = StudyConfig.model_validate(
        {"name": path.name, "studies": str(path.parent), "base": base, "variants": list(variants), "seeds": every}
    )
    folder = StudyFolder(path)
    for index, variant in enumerate(variants):
        for seed in range(every):
            name = f"{variant}-seed{seed}"
            broken = bool(failed) and seed == seeds and variant == variants[-1]
            run = folder.run(name).path
            make_run(run, objective=variant, seed=seed, gain=0.2 + 0.2 * index, **settings)
            folder.write_state(name, FAILED if broken else DONE, failed if broken else None)
    write_text(folder.study, dump_toml(study.model_dump(mode="json")))
    write_results(study, folder, say=lambda text: None)
    return path
