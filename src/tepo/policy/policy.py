"""A causal language model as a policy: encode, decode, score, copy, save."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tepo.core.errors import InputError, nearest
from tepo.policy.activations import recomputing
from tepo.policy.batching import PADDED, Layout
from tepo.policy.device import store_frozen_linears
from tepo.policy.head import Head, Identity
from tepo.policy.lora import Adapter
from tepo.policy.sequences import (
    Scored,
    Scores,
    TokenSequence,
    check_sequences,
    in_order,
    scored_tokens,
    scores_of,
)
from tepo.policy.statistics import Request, token_statistics
from tepo.policy.tied import one_gradient
from tepo.policy.trained import Trained

STATISTICS = frozenset({"entropy", "entropy_grad", "sum_p2", "sum_p2_logp", "kl_full"})


class Policy(Trained):
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
        head: turns hidden states into logits chunk by chunk; None scores with the model's own logits, all at once.
        layout: how rows share a pass: with padding or without, prompts they have in common once or not.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        adapter: Adapter | None = None,
        recomputed: Sequence[nn.Module] = (),
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
        self.head: Head | None = None
        self.layout: Layout = PADDED
        self._adapter = adapter
        self._adapter_off = False
        self._recomputed = recomputed
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
            while len(ids) > 1 and ids[-1] in self.eos_ids:  # some tokenizers close the text; a prompt stays open
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

    def compute_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context the model computes in (nothing but for bfloat16)."""
        if self.compute_dtype != torch.bfloat16:
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
        parts = self.layout.split(sequences, range(len(sequences)), self._max_batch_tokens)
        if len(parts) == 1:
            return self._score_rows(sequences, temperature, statistics, width, reference)
        columns = max(len(sequence.response) for sequence in sequences) if width is None else width
        scored = [
            self._score_rows([sequences[row] for row in rows], temperature, statistics, columns, reference)
            for rows in parts
        ]
        return in_order(scored, [row for rows in parts for row in rows])

    def _check_request(self, temperature: float, statistics: frozenset[str], reference: Policy | None) -> None:
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
        scored = scored_tokens(sequences, width=width, device=self.device)
        hidden, head, weight = self._predictors(sequences, scored)
        reference_hidden, reference_head = None, None
        if reference is not None:
            with torch.no_grad():
                moved = scored_tokens(sequences, width=width, device=reference.device)
                reference_hidden, reference_head, _ = reference._predictors(sequences, moved)
                reference_hidden = reference_hidden.to(self.device)
        request = Request(
            head=head,
            targets=scored.tokens,
            temperature=temperature,
            chunk=self._head_chunk,
            entropy=bool({"entropy", "entropy_grad"} & statistics),
            entropy_grad="entropy_grad" in statistics,
            sum_p2="sum_p2" in statistics,
            sum_p2_logp="sum_p2_logp" in statistics,
            reference=reference_head,
            reference_hidden=reference_hidden,
        )
        return scores_of(token_statistics(hidden, request, weight), scored)

    def _predictors(self, sequences: Sequence[TokenSequence], scored: Scored) -> tuple[Tensor, Head, Tensor | None]:
        """Return what the head turns into logits [N, D] for the scored tokens, that head, and what stands in for its
        weight where the embedding's is the same."""
        from tepo.policy.passes import predicting_states

        self._still()
        recomputed = self._recomputed if torch.is_grad_enabled() else ()
        model = self.model if self.head is None else self.model.base_model
        shared = nullcontext() if self.head is None else one_gradient(model, self.head)
        with self._active(), self.compute_context(), recomputing(recomputed), shared as weight:
            states = predicting_states(model, sequences, scored, self.layout)
        return states, self.head or Head(Identity(), dtype=states.dtype), weight

    def _still(self) -> None:
        """Put the model back in evaluation mode, so without dropout, where somebody called model.train()."""
        if self.model.training:
            self.model.eval()

    def _active(self) -> AbstractContextManager[Any]:
        """Return the context in which the shared model is this policy: a LoRA reference switches the adapter off."""
        return self._adapter.off() if self._adapter is not None and self._adapter_off else nullcontext()

    def frozen_copy(self) -> Policy:
        """Return a reference, for which nothing is ever trained.

        Without an adapter it is the policy as it is now, with weights of its own. With one it is the start policy:
        the same model with the adapter off.

        Raises:
            InputError: the model with the adapter off is not the start policy.
        """
        frozen = copy.copy(self)
        frozen._recomputed = ()
        if self._adapter is not None:
            if reason := self._adapter.why_no_reference:
                raise InputError(
                    f"no reference policy for {self.name!r}: {reason}. Start from a merged model, or choose an"
                    " objective and settings without a reference"
                )
            frozen._adapter_off = True
            if self.head is not None and self._adapter.covers(self.head.module):
                frozen.head = replace(self.head, active=self._adapter.off)
            return frozen
        frozen.model = copy.deepcopy(self.model).requires_grad_(False)
        store_frozen_linears(frozen.model, self.compute_dtype)
        if self.head is not None:
            frozen.head = replace(self.head, module=frozen.model.get_output_embeddings())
        return frozen

    def save(self, folder: Path) -> None:
        """Write model and tokenizer into `folder`, loadable by transformers; wrap in core.files.new_directory.

        With an adapter the model is written merged, float32, and the adapter beside it in `adapter/`.
        """
        if self._adapter is None:
            self.model.save_pretrained(folder)
        else:
            self.model.save_pretrained(folder, state_dict=self._adapter.merged_state())
            self._adapter.save(folder / "adapter")
        self.tokenizer.save_pretrained(folder)
