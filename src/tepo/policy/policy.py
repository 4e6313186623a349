"""A causal language model as a policy: encode, decode, score, copy, save."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tepo.core.errors import InputError, nearest
from tepo.policy.head import Head, Request, TokenStatistics, token_statistics
from tepo.policy.sequences import Layout, Scores, TokenSequence, check_sequences, lay_out, split_rows

STATISTICS = frozenset({"entropy", "entropy_grad", "sum_p2", "sum_p2_logp", "kl_full"})


class Policy:
    """A causal language model with its tokenizer.

    Attributes:
        model: the transformers model, adapter layers included; always in evaluation mode, so dropout is off.
        tokenizer: its transformers tokenizer.
        device: where it computes.
        compute_dtype: precision of its matrix products; trained weights are float32.
        eos_ids: every token id that ends a response, ascending.
        pad_id: a token id that may fill unused places.
        name: what was loaded, for messages.
        max_positions: the longest sequence the model takes.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        head: Head | None,
        name: str,
        device: torch.device,
        compute_dtype: torch.dtype,
        eos_ids: tuple[int, ...],
        pad_id: int,
        max_positions: int,
        head_chunk: int = 1024,
        max_batch_tokens: int = 16384,
    ) -> None:
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.name = name
        self.device = device
        self.compute_dtype = compute_dtype
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.max_positions = max_positions
        self._head = head
        self._head_chunk = head_chunk
        self._max_batch_tokens = max_batch_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer knows how to write a conversation."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def vocabulary(self) -> int:
        """Rows of the model's embedding: the number of token ids it takes."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def encode(self, messages: Sequence[Mapping[str, str]], *, chat: bool) -> list[int]:
        """Return the prompt's token ids.

        With `chat` the tokenizer's chat template writes the messages and opens the assistant's turn; without it the
        contents are joined by newlines as plain text, with the tokens the tokenizer puts before a text (BOS).
        """
        if not messages:
            raise InputError("encode() needs at least one message, got none")
        if not chat:
            ids = list(self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
            while (
                len(ids) > 1 and ids[-1] in self.eos_ids
            ):  # some tokenizers close the text, which a prompt must not be
                ids.pop()
            return ids
        if not self.has_chat_template:
            raise InputError(f"the tokenizer of {self.name!r} has no chat template; set task.chat=false")
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of token ids, without special tokens unless `special` is set."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that training changes; tied ones once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def compute_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context the model computes in (nothing in float32)."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def score(
        self,
        sequences: Sequence[TokenSequence],
        *,
        temperature: float = 1.0,
        statistics: frozenset[str] = frozenset({"entropy"}),
        width: int | None = None,
        reference: Policy | None = None,
    ) -> Scores:
        """Return log-probabilities and statistics [B, T] of the response tokens; T is `width` or the longest response.

        The distribution is the full vocabulary's after temperature, before any top-p or top-k. Log-probabilities and
        `kl_full` (against `reference`) carry a gradient unless torch.no_grad() is on; the entropy carries its exact
        gradient when "entropy_grad" is among the statistics.

        Raises:
            InputError: a sequence that cannot be scored, an unknown statistic, a temperature that is not positive.
        """
        self._check_request(temperature, statistics, reference)
        check_sequences(sequences, vocabulary=self.vocabulary, max_positions=self.max_positions)
        if torch.is_grad_enabled():
            return self._score_rows(sequences, temperature, statistics, width, reference)
        parts = split_rows(sequences, self._max_batch_tokens)
        if len(parts) == 1:
            return self._score_rows(sequences, temperature, statistics, width, reference)
        columns = max(len(sequence.response) for sequence in sequences) if width is None else width
        scored = [
            self._score_rows([sequences[row] for row in rows], temperature, statistics, columns, reference)
            for rows in parts
        ]
        return _in_order(scored, [row for rows in parts for row in rows])

    def _check_request(
        self, temperature: float, statistics: frozenset[str], reference: Policy | None
    ) -> None:
        if not temperature > 0:
            raise InputError(f"temperature={temperature} cannot be scored; it must be greater than 0")
        for name in sorted(statistics - STATISTICS):
            raise InputError(f"unknown statistic {name!r}.{nearest(name, STATISTICS)}")
        if ("kl_full" in statistics) != (reference is not None):
            raise InputError(
                "the statistic 'kl_full' needs reference=..."
                if reference is None
                else "reference=... is used by the statistic 'kl_full' only, which was not asked for"
            )
        if reference is not None and reference.vocabulary != self.vocabulary:
            raise InputError(
                f"the reference has a vocabulary of {reference.vocabulary}, the policy one of {self.vocabulary}"
            )

    def _score_rows(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float,
        statistics: frozenset[str],
        width: int | None,
        reference: Policy | None,
    ) -> Scores:
        layout = lay_out(sequences, width=width, device=self.device)
        hidden, head = self._predictors(layout)
        reference_hidden, reference_head = None, None
        if reference is not None:
            with torch.no_grad():
                moved = lay_out(sequences, width=width, device=reference.device)
                reference_hidden, reference_head = reference._predictors(moved)
                reference_hidden = reference_hidden.to(self.device)
        request = Request(
            head=head,
            targets=layout.targets,
            temperature=temperature,
            chunk=self._head_chunk,
            entropy=bool({"entropy", "entropy_grad"} & statistics),
            entropy_grad="entropy_grad" in statistics,
            sum_p2="sum_p2" in statistics,
            sum_p2_logp="sum_p2_logp" in statistics,
            reference=reference_head,
            reference_hidden=reference_hidden,
        )
        return _spread(token_statistics(hidden, request), layout)

    def _predictors(self, layout: Layout) -> tuple[Tensor, Head]:
        """Return what the head turns into logits [N, D] for the scored tokens, and that head."""
        self.still()
        with self.compute_context():
            assert self._head is not None
            hidden = self.model.base_model(input_ids=layout.ids, use_cache=False)[0]
        return hidden.flatten(0, 1).index_select(0, layout.predictors), self._head

    def still(self) -> None:
        """Put the model back in evaluation mode where somebody called model.train()."""
        if self.model.training:
            self.model.eval()

    def frozen_copy(self) -> Policy:
        """Return a reference: the policy as it is now, with weights of its own that never change."""
        frozen = copy.copy(self)
        frozen.model = copy.deepcopy(self.model).requires_grad_(False)
        if self._head is not None:
            frozen._head = Head(frozen.model.get_output_embeddings(), self._head.post, self._head.dtype)
        return frozen

    def save(self, folder: Path) -> None:
        """Write the model and tokenizer to `folder`, loadable by transformers."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the trained weights by name, sharing memory with the model."""
        return {
            n: parameter.detach() for n, parameter in self.model.named_parameters() if parameter.requires_grad
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy trained weights, as `state_tensors` names them, into the model.

        Raises:
            InputError: a name is missing or unknown, or a shape differs.
        """
        own = self.state_tensors()
        for name in sorted(own.keys() ^ tensors.keys()):
            state = "lacks" if name in own else "has an unknown"
            raise InputError(
                f"the checkpoint {state} tensor {name!r}; it was written for another model or adapter"
            )
        for name, value in tensors.items():
            if own[name].shape != value.shape:
                raise InputError(
                    f"tensor {name!r} of the checkpoint is {tuple(value.shape)}, the model's is {tuple(own[name].shape)}"
                )
        for name, value in tensors.items():
            own[name].copy_(value)


def _spread(found: TokenStatistics, layout: Layout) -> Scores:
    """Put the statistics [N] of the scored tokens into their places [B, T]; zero elsewhere."""

    def place(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        flat = values.new_zeros(layout.mask.numel()).index_copy(0, layout.slots, values)
        return flat.view(layout.mask.shape)

    logp = place(found.logp)
    assert logp is not None
    return Scores(
        logp=logp,
        mask=layout.mask,
        entropy=place(found.entropy),
        sum_p2=place(found.sum_p2),
        sum_p2_logp=place(found.sum_p2_logp),
        kl_full=place(found.kl_full),
    )


def _in_order(scored: Sequence[Scores], rows: Sequence[int]) -> Scores:
    """Join parts of a batch and put the rows back in their order."""
    back = torch.argsort(torch.tensor(rows))

    def join(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in scored]
        return None if values[0] is None else torch.cat(values)[back.to(values[0].device)]

    logp, mask = join("logp"), join("mask")
    assert logp is not None
    assert mask is not None
    rest = {name: join(name) for name in ("entropy", "sum_p2", "sum_p2_logp", "kl_full")}
    return Scores(logp=logp, mask=mask, **rest)
