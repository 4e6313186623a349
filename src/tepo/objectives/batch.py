"""The token batch: what an objective sees of a set of responses, and nothing of where they came from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo.core.errors import InputError

TOKEN_FIELDS = (
    "logp",
    "mask",
    "old_logp",
    "ref_logp",
    "rollout_logp",
    "entropy",
    "old_entropy",
    "token_ids",
    "token_rewards",
    "values",
    "old_values",
    "other_logp",
    "sum_p2",
    "sum_p2_logp",
    "kl_full",
    "returns",
)
# Token fields that are no numbers to compute with.
LABEL_FIELDS = ("mask", "token_ids")
# What the scorer computes beside the log-probs.
SCORER_FIELDS = frozenset({"entropy", "sum_p2", "sum_p2_logp", "kl_full"})
# Fields whose non-finite value inside the mask is an error.
FINITE_FIELDS = (
    *(name for name in TOKEN_FIELDS if name not in LABEL_FIELDS),
    "advantage",
)

HOW_TO_GET = {
    "old_logp": "log-probs of the sampling policy; omit it only for the first update after sampling",
    "ref_logp": "log-probs under the reference policy: score the tokens with a frozen copy of the start policy",
    "rollout_logp": "log-probs recorded by the sampler while it generated",
    "entropy": "per-token entropy of the current policy: ask the scorer for the statistic 'entropy'",
    "old_entropy": "per-token entropy of the sampling policy: keep the scorer's 'entropy' of the rollout batch",
    "sum_p2": "sum of squared probabilities: ask the scorer for the statistic 'sum_p2'",
    "sum_p2_logp": "sum of p^2 log p: ask the scorer for the statistic 'sum_p2_logp'",
    "kl_full": "exact KL to the reference over the vocabulary: ask the scorer for 'kl_full' with a reference",
    "values": "a critic's current values of the state before each token, with gradient",
    "old_values": "the critic's values of the state before each token, from before the updates",
    "other_logp": "log-probs of the same tokens under another policy: a teacher, or one that learns beside",
    "returns": "set by prepare, which needs old_values: call it first",
    "rewards": "one reward a response, shape [B] (or [B, K] components), or pass advantage= instead",
    "group": "the prompt each response belongs to, any integers, shape [B]",
    "correct": "true where the response got a full score, shape [B]",
    "row_id": "a number for each response, whatever batch it is in, shape [B]; in a single batch torch.arange(B)",
    "token_ids": "the response's tokens, shape [B, T]",
    "group_lengths": "set by prepare, which needs group: call it first",
    "truncated": "true where the response hit the length limit, shape [B]",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """Responses as aligned token arrays; B rows of T positions.

    `[B, T]`: `logp` (current policy, may carry a gradient), `mask` (bool, true on response tokens, EOS
    included; may have holes), `old_logp` (omitted = first update: the ratio is taken against the detached
    `logp`), `ref_logp`, `rollout_logp` (the sampler's own), `entropy`, `old_entropy` (nats), `token_ids`,
    `token_rewards`, `values` and `old_values` (a critic's, of the state before the token), `other_logp`, scorer
    statistics `sum_p2`, `sum_p2_logp`, `kl_full`, and `returns` (a critic's targets, set by `prepare`).
    `[B]`: `rewards` (or `[B, K]` components; NaN = this reward cannot score the response), `group` (any
    integers), `row_id`, `truncated`, `correct`, `advantage` (also `[B, T]`), `informative` (bool, set by `prepare`:
    the rewards of the row's group differ; a mini-batch may hold a part of a group only). `[B, G]`: `group_lengths`
    (set by `prepare` where a row weight reads it: the row's length, then those of its group).

    Padding may be left, right or both and hold anything: values outside the mask never reach a result.
    Raises `InputError` for a shape or dtype that does not fit.
    """

    logp: Tensor
    mask: Tensor
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    entropy: Tensor | None = None
    old_entropy: Tensor | None = None
    token_ids: Tensor | None = None
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    other_logp: Tensor | None = None
    sum_p2: Tensor | None = None
    sum_p2_logp: Tensor | None = None
    kl_full: Tensor | None = None
    returns: Tensor | None = None
    rewards: Tensor | None = None
    group: Tensor | None = None
    row_id: Tensor | None = None
    truncated: Tensor | None = None
    correct: Tensor | None = None
    advantage: Tensor | None = None
    informative: Tensor | None = None
    group_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        _expect_tensor("mask", self.mask)
        if self.mask.dtype != torch.bool:
            raise InputError(f"mask has dtype {self.mask.dtype}, expected torch.bool: pass mask=mask.bool()")
        if self.mask.dim() != 2:
            raise InputError(f"mask has shape {tuple(self.mask.shape)}, expected [B, T]")
        whole, rows = self.mask.shape, self.mask.shape[:1]
        for name, value in self.present():
            _expect_tensor(name, value)
            shape = value.shape
            if name in TOKEN_FIELDS:
                fits, words = shape == whole, f"[B, T] like mask = {tuple(whole)}"
            elif name == "advantage":
                fits, words = shape in (rows, whole), f"[B] or [B, T], mask is {tuple(whole)}"
            elif name == "group_lengths":
                fits, words = shape[:1] == rows and value.dim() == 2, f"[B, G], B={rows[0]}"
            elif name == "rewards":
                fits, words = shape[:1] == rows and value.dim() <= 2, f"[B] or [B, K], B={rows[0]}"
            else:
                fits, words = shape == rows, f"[B] = {tuple(rows)}"
            if not fits:
                raise InputError(f"{name} has shape {tuple(shape)}, expected {words}")

    def replace(self, **fields: Any) -> TokenBatch:
        """Return a copy with some fields replaced."""
        return dataclasses.replace(self, **fields)

    def take(self, rows: Tensor, width: int | None = None) -> TokenBatch:
        """Return the given rows (integer index `[b]`); token fields are cut to the first `width` columns."""
        chosen = {name: value.index_select(0, rows) for name, value in self.present()}
        token_fields = (*TOKEN_FIELDS, "advantage")
        cut = {name: value[:, :width] for name, value in chosen.items() if name in token_fields and value.dim() == 2}
        return TokenBatch(**{**chosen, **cut})

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return the batch on another device."""
        return TokenBatch(**{name: value.to(device) for name, value in self.present()})

    def present(self) -> list[tuple[str, Tensor]]:
        """Return the fields that are set, as (name, tensor)."""
        return [(name, value) for name, value in vars(self).items() if value is not None]

    def lengths(self) -> Tensor:
        """Number of response tokens of each row, `[B]`, holes not counted."""
        return self.mask.sum(dim=1)


def _expect_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}, expected a torch.Tensor: pass torch.as_tensor({name})")
    if name == "logp" and not value.is_floating_point():
        raise InputError(f"logp has dtype {value.dtype}, expected a floating-point type")
    if name in ("group", "row_id", "token_ids") and (value.is_floating_point() or value.dtype == torch.bool):
        raise InputError(f"{name} has dtype {value.dtype}, expected integers: pass {name}={name}.long()")


def require(batch: TokenBatch, field: str, owner: str) -> Tensor:
    """Return a field, or raise the error that names it and how to obtain it."""
    value: Tensor | None = getattr(batch, field)
    if value is None:
        raise InputError(f"{owner} needs TokenBatch.{field}: {HOW_TO_GET.get(field, 'pass it to TokenBatch')}")
    return value


def clean(batch: TokenBatch) -> TokenBatch:
    """Return the batch as the parts compute with it: float32 or better, zero outside the mask, old values filled.

    `where` (not multiplication) cuts the padding off, so NaN or inf there reaches neither value nor gradient.
    Without `old_logp` this is the first update: the old policy is the current one, detached.
    """
    fields: dict[str, Tensor] = {}
    for name, value in batch.present():
        if name == "rewards":
            fields[name] = at_least_float32(value)
        elif name == "advantage" or (name in TOKEN_FIELDS and name not in LABEL_FIELDS):
            upcast = at_least_float32(value)
            tokens = upcast[:, None].expand_as(batch.mask) if upcast.dim() == 1 else upcast
            fields[name] = torch.where(batch.mask, tokens, torch.zeros_like(tokens))
        else:
            fields[name] = value
    if "old_logp" not in fields:
        fields["old_logp"] = fields["logp"].detach()
        if "entropy" in fields and "old_entropy" not in fields:
            fields["old_entropy"] = fields["entropy"].detach()
    return TokenBatch(**fields)


def at_least_float32(value: Tensor) -> Tensor:
    """Upcast halves and integers to float32; leave float32 and float64 alone."""
    return value if value.dtype in (torch.float32, torch.float64) else value.to(torch.float32)


def check_finite(batch: TokenBatch) -> None:
    """Raise `InputError` naming the first value of a token inside the mask that is not finite."""
    for name in FINITE_FIELDS:
        value: Tensor | None = getattr(batch, name)
        if value is None:
            continue
        tokens = value[:, None].expand_as(batch.mask) if value.dim() == 1 else value
        bad = batch.mask & ~torch.isfinite(tokens)
        if bool(bad.any()):
            row, column = (int(index) for index in bad.nonzero()[0])
            hint = (
                "a sampled token has a positive probability; score without top-k or top-p, or mask the token"
                if name.endswith("logp")
                else "mask the token, or mend what computed it"
            )
            raise InputError(
                f"{name}[{row}, {column}] is {float(tokens[row, column])} inside the mask, "
                f"expected a finite number: {hint}"
            )


def check_rewards(batch: TokenBatch) -> None:
    """Raise `InputError` for an infinite reward; NaN is legal: this reward cannot score the response."""
    if batch.rewards is not None and bool(torch.isinf(batch.rewards).any()):
        index = torch.isinf(batch.rewards).nonzero()[0].tolist()
        raise InputError(
            f"rewards{index} is {float(batch.rewards[tuple(index)])}, expected a finite number, "
            "or NaN where the reward cannot score the response"
        )


def group_index(group: Tensor) -> tuple[Tensor, int]:
    """Map any integer group ids to 0..n-1; return (index `[B]`, n)."""
    unique, index = torch.unique(group, return_inverse=True)
    return index, int(unique.numel())
