"""A reward model: a sequence-classification model that reads question and response and says one number.

It runs in this process, on the policy's device; nothing of it is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.tasks.problem import Problem

ROWS = 16
"""Responses read at once."""


class RewardModel:
    """A reward model ready to score.

    A conversation is written with the model's own chat template where it has one (the response as the assistant's
    turn), else as the prompt's plain text followed by the response. The score is the one of the last token: padding
    is on the right and never looked at, whatever id it has.

    Raises:
        InputError: the folder holds no model with a single score.
    """

    def __init__(self, path: str, *, device: str | None = None) -> None:
        import torch
        import transformers

        if not Path(path).is_dir():
            raise InputError(f"reward.path={path!r}: expected the folder of a sequence-classification model")
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype: Any = "auto" if chosen.startswith("cuda") else torch.float32
        with _quiet():
            try:
                self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
                model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                    path, dtype=dtype, output_loading_info=True, local_files_only=True
                )
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                raise InputError(f"reward.path={path!r} cannot be loaded as a reward model: {error}") from error
        if model.config.num_labels != 1:
            raise InputError(f"reward.path={path!r} has {model.config.num_labels} labels; a reward model has one")
        if missing := sorted(report["missing_keys"]):
            raise InputError(
                f"reward.path={path!r} lacks {len(missing)} weights, first {missing[0]!r}: "
                "it would score with random numbers there"
            )
        self.model: Any = model.to(chosen).eval().requires_grad_(False)
        self.path = path
        self._limit = getattr(model.config, "max_position_embeddings", None) or 1 << 30

    def scores(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float | None]:
        """Return one score a response, in order; None for one that is longer than the model's positions."""
        ids = [self._encode(problem, response) for problem, response in zip(problems, responses, strict=True)]
        order = sorted((row for row in range(len(ids)) if len(ids[row]) <= self._limit), key=lambda row: len(ids[row]))
        found: list[float | None] = [None] * len(ids)
        for start in range(0, len(order), ROWS):
            rows = order[start : start + ROWS]
            for row, score in zip(rows, self._forward([ids[row] for row in rows]), strict=True):
                found[row] = score
        return found

    def _encode(self, problem: Problem, response: str) -> list[int]:
        # A tokenizer that ends a text itself (EOS) does so here too: reward models are trained that way.
        if getattr(self.tokenizer, "chat_template", None):
            turns = [*(dict(message) for message in problem.messages), {"role": "assistant", "content": response}]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        text = "\n".join(message["content"] for message in problem.messages) + response
        return list(self.tokenizer(text)["input_ids"])

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        width = max(map(len, rows))
        device = self.model.device
        ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        with torch.no_grad():
            if hasattr(self.model, "score"):  # a causal model: the hidden state of the last token
                hidden = self.model.base_model(input_ids=ids, attention_mask=mask)[0]
                last = torch.tensor([len(row) - 1 for row in rows], device=device)
                logits = self.model.score(hidden[torch.arange(len(rows), device=device), last])
            else:
                logits = self.model(input_ids=ids, attention_mask=mask).logits
        scores: list[float] = logits[:, 0].double().tolist()
        return scores


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep transformers' progress bars off the screen while a model loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
