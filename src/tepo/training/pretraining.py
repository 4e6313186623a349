"""Pre-training text mixed into the updates (PPO-ptx, arXiv 2203.02155 eq. 2, last line).

Each update adds -coef times the mean log-likelihood of a token over windows of the text. Which windows is a function of
(seed, update), so a continued run sees the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tepo.core.errors import InputError
from tepo.core.seeds import stream
from tepo.objectives import Parts, Sums
from tepo.policy import Policy, TokenSequence
from tepo.training.config import RunConfig
from tepo.training.micro import micro_batches


@dataclass(frozen=True)
class PretrainingText:
    """A text as token ids, and how much of it each update reads."""

    ids: tuple[int, ...]
    length: int
    windows: int
    seed: int

    def sequences(self, update: int) -> list[TokenSequence]:
        """Return the windows of one update; the first token of each is given, not scored."""
        draw = stream(self.seed, "pretraining", update)
        starts = [draw.randrange(len(self.ids) - self.length) for _ in range(self.windows)]
        windows = [self.ids[start : start + self.length + 1] for start in starts]
        return [TokenSequence(window[:1], window[1:]) for window in windows]

    def accumulate(self, policy: Policy, coef: float, *, update: int, tokens: int) -> Parts:
        """Add the gradient of -coef mean log pi to the policy's, in parts of at most `tokens` padded tokens."""
        rows = self.sequences(update)
        count = self.windows * self.length
        total = torch.zeros((), device=policy.device)
        for part in micro_batches(rows, range(len(rows)), tokens):
            scored = policy.score([rows[row] for row in part], statistics=frozenset())
            loss = -coef * scored.logp.sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return Parts(total, Sums(totals={"loss": total, "loss/ptx": total}))


def load_text(config: RunConfig, policy: Policy, coef: float, say: Callable[[str], None]) -> PretrainingText | None:
    """Return the text that an objective with a pre-training term reads; None for one without.

    Raises:
        InputError: the text is missing, unreadable or too short, or is given to an objective that has no such term.
    """
    settings = config.pretraining
    if coef == 0:
        if settings.path is not None:
            raise InputError(
                "pretraining.path is given, but the objective has no pre-training term: set objective.ptx_coef"
            )
        return None
    if settings.path is None:
        raise InputError(f"objective.ptx_coef is {coef}: name the text file in pretraining.path, or set it to 0")
    try:
        text = Path(settings.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"pretraining.path={settings.path!r} cannot be read as UTF-8 text: {error}") from error
    ids = _tokens(policy, text)
    length = min(settings.length, policy.max_positions - 1, len(ids) - 1)
    if length < 1:
        raise InputError(f"pretraining.path={settings.path!r} has {len(ids)} tokens: expected 2 at least")
    say(f"pre-training text: {len(ids)} tokens, {settings.windows} windows of {length} in each update")
    return PretrainingText(tuple(ids), length, settings.windows, config.train.seed)


def _tokens(policy: Policy, text: str) -> Sequence[int]:
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
