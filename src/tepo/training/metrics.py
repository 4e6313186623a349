"""What a step reports beside the objective's own metrics. Names are listed, with their meaning, in `MEANING`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tepo.objectives import TokenBatch
from tepo.training.experience import Experience, Group

MEANING = {
    "reward/mean": "mean reward of all responses sampled in the step, before any filter",
    "reward/std": "sample standard deviation of those rewards",
    "reward/pass_rate": "fraction of responses with a full score of the first reward",
    "reward/errors": "responses whose reward failed",
    "reward/timeouts": "responses whose reward hit its time limit; `reward/timed_out` names them as [draw, sample]",
    "reward/unscored": "responses no reward could score",
    "group/signal": "fraction of groups whose rewards differ",
    "group/drawn": "groups sampled",
    "group/kept": "groups trained on",
    "group/zero_std": "fraction of the trained groups whose rewards are all equal",
    "length/mean": "mean response length in tokens, the end-of-sequence token included",
    "length/max": "longest response",
    "length/truncated": "fraction of responses cut at the length limit",
    "length/terminated": "mean length of the responses that ended by themselves",
    "entropy/rollout": "mean entropy while sampling (nats), of all responses sampled",
    "entropy/old": "mean entropy of the sampling policy on the trained tokens",
    "entropy/new": "mean entropy of the current policy, over the step's updates",
    "entropy/change": "their difference",
    "mismatch/logp": "mean absolute difference between the sampler's and the scorer's log-probs",
    "mismatch/max": "largest such difference",
    "mismatch/kl": "mean of sampler's less scorer's log-prob, an estimate of KL(sampler, scorer)",
    "ratio/mean": "mean importance ratio (ratio/min and ratio/max: extremes)",
    "clip/low": "fraction of tokens clipped below (clip/high above, clip/dual at the dual bound)",
    "kl/old": "KL to the sampling policy (k3 estimate)",
    "kl/ref": "KL to the reference policy (k3 estimate)",
    "mask/kl": "fraction of tokens under TEPO's KL mask",
    "loss": "the objective's loss, mean over the step's updates (loss/policy, loss/kl: its terms)",
    "grad/norm": "gradient norm before clipping",
    "lr": "learning rate, mean over the step's updates",
    "update/skipped": "fraction of updates left out because a gradient was not finite",
    "updates": "optimizer updates of the step",
    "tokens": "response tokens sampled so far",
    "draws": "problems drawn so far",
    "micro_tokens": "token budget of a micro-batch in force (0: no limit)",
    "time/step": "seconds of the step (time/PHASE: of one phase)",
    "speed/sample": "tokens a second of a phase: sampled (sample), scored (score), trained on (update)",
    "memory/peak_mb": "largest resident memory of the process so far; memory/device_mb on an accelerator",
}


def rollout_metrics(experience: Experience) -> dict[str, Any]:
    """Return rewards, signal, lengths and entropy over everything sampled in the step."""
    drawn = experience.drawn
    responses = [response for group in drawn for response in group.responses]
    lengths = torch.tensor([len(response.token_ids) for response in responses])
    truncated = torch.tensor([response.stop_reason == "length" for response in responses])
    entropies = [value for response in responses for value in response.entropy]
    return {
        **reward_metrics(drawn),
        "group/signal": statistics.fmean(group.has_signal for group in drawn),
        "group/drawn": len(drawn),
        "group/kept": len(experience.groups),
        **length_metrics(lengths, truncated),
        "entropy/rollout": statistics.fmean(entropies) if entropies else math.nan,
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the statistics of the rewards; responses without one are counted and left out."""
    grades = [grade for group in groups for grade in group.grades]
    scores = [grade.score for grade in grades if grade.score is not None]
    timed_out = [
        [group.draw, sample] for group in groups for sample, grade in enumerate(group.grades) if grade.timed_out
    ]
    return {
        "reward/mean": statistics.fmean(scores) if scores else math.nan,
        "reward/std": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "reward/pass_rate": statistics.fmean(grade.passed for grade in grades),
        "reward/errors": sum(grade.error is not None for grade in grades),
        "reward/timeouts": len(timed_out),
        **({"reward/timed_out": timed_out} if timed_out else {}),
        "reward/unscored": len(grades) - len(scores),
        **_part_means(groups),
    }


def _part_means(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each part of a composed reward, where there are several."""
    parts = [grade.parts for group in groups for grade in group.grades]
    names = sorted({name for part in parts for name in part})
    if len(names) < 2:
        return {}
    values = {name: [value for part in parts if (value := part.get(name)) is not None] for name in names}
    return {f"reward/part/{name}": statistics.fmean(found) for name, found in values.items() if found}


def length_metrics(lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """Return the length statistics of responses from their token counts `[B]` and truncation flags `[B]`.

    Truncated responses count in the mean; the mean of the terminated ones is reported apart (NaN without any).
    """
    values = lengths.double()
    ended = values[~truncated]
    return {
        "length/mean": float(values.mean()),
        "length/max": float(values.max()),
        "length/truncated": float(truncated.double().mean()),
        "length/terminated": float(ended.mean()) if ended.numel() else math.nan,
    }


def mismatch_metrics(batch: TokenBatch, scored: Tensor) -> dict[str, float]:
    """Return how far the sampler's log-probs are from the scorer's of the same policy, `[B, T]`."""
    if batch.rollout_logp is None or not bool(batch.mask.any()):
        return {}
    difference = (batch.rollout_logp - scored)[batch.mask].double()
    return {
        "mismatch/logp": float(difference.abs().mean()),
        "mismatch/max": float(difference.abs().max()),
        "mismatch/kl": float(difference.mean()),
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the peak memory of the process and of the device, in MiB."""
    result = {}
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result["memory/peak_mb"] = peak / (1024 * 1024 if sys.platform == "darwin" else 1024)
    if device.type == "cuda":
        result["memory/device_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    return result
