"""Sampled responses on disk, with per-token fields, for people and for the viewer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from tepo.core.files import write_text
from tepo.objectives import TokenBatch
from tepo.training.experience import Experience
from tepo.training.update import Learned

_DIGITS = 6


def write_rollouts(
    path: Path,
    experience: Experience,
    batch: TokenBatch,
    learned: Learned,
    decode: Callable[[int], str],
    *,
    responses: int,
) -> None:
    """Write the first `responses` rows of a step as JSON lines, atomically.

    Text fields: question, answer, response, reward, passed, parts, error. Per-token fields, aligned with `token_ids`
    and `tokens`: `rollout_logp` and `rollout_entropy` (the sampler's), `old_logp` and `old_entropy` (the scorer's,
    where it ran), `ref_logp` (the reference's) and `old_values` (a critic's), where there is one, `logp` and
    `entropy` (in the last pass over the row), `advantage`.
    """
    rows = [(group, sample) for group in experience.groups for sample in range(len(group.responses))][:responses]
    lines = []
    for row, (group, sample) in enumerate(rows):
        response, grade = group.responses[sample], group.grades[sample]
        size = len(response.token_ids)
        record: dict[str, Any] = {
            "draw": group.draw,
            "sample": sample,
            "problem": group.problem.id,
            "question": group.problem.question,
            "answer": group.problem.answer,
            "response": response.text,
            "reward": grade.score,
            "passed": grade.passed,
            "parts": dict(grade.parts),
            "error": grade.error,
            "stop_reason": response.stop_reason,
            "prompt_ids": list(response.prompt_ids),
            "token_ids": list(response.token_ids),
            "tokens": [decode(token) for token in response.token_ids],
            "rollout_logp": [round(value, _DIGITS) for value in response.logp],
            "rollout_entropy": [round(value, _DIGITS) for value in response.entropy],
        }
        fields = {
            "old_logp": batch.old_logp,
            "old_entropy": batch.old_entropy,
            "ref_logp": batch.ref_logp,
            "old_values": batch.old_values,
            "logp": learned.logp,
            "entropy": learned.entropy,
            "advantage": batch.advantage,
        }
        record |= {name: _row(value, row, size) for name, value in fields.items() if value is not None}
        lines.append(json.dumps(record, ensure_ascii=False))
    write_text(path, "".join(line + "\n" for line in lines))


def _row(values: Tensor, row: int, size: int) -> list[float]:
    return [round(value, _DIGITS) for value in values[row, :size].tolist()]
