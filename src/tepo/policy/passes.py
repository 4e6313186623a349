"""From token sequences to the states that predict their scored tokens: one pass over whole rows, or two with the
prompts that rows have in common computed once.

The second way runs the distinct prompts through the model, keeping keys and values, and then all responses behind
them. It is the model's ordinary use of its cache, with a gradient: what the responses say of a prompt's keys and values
adds up over its rows and flows back into the one pass over the prompt.

Loads transformers: imported where a pass is made, not by `tepo.policy`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tepo.policy.attention_interface import the_same_without_gradient
from tepo.policy.batching import Sharing, extent_of
from tepo.policy.sequences import Scored, TokenSequence, padded


def predicting_states(model: Any, sequences: Sequence[TokenSequence], scored: Scored, sharing: Sharing) -> Tensor:
    """Return the states [N, D] that predict the scored tokens, from a transformers model's first output [B, L, D]."""
    with the_same_without_gradient():
        if sharing.wanted(extent_of(sequences)):
            return shared_prompts(model, sequences, scored)
        return separate_prompts(model, sequences, scored)


def separate_prompts(model: Any, sequences: Sequence[TokenSequence], scored: Scored) -> Tensor:
    """Return the states [N, D] that predict the scored tokens; every row brings its own prompt."""
    device = scored.mask.device
    ids = padded([(*sequence.prompt, *sequence.response) for sequence in sequences], device)
    states: Tensor = model(input_ids=ids, use_cache=False)[0]
    lengths = torch.tensor([len(sequence.prompt) for sequence in sequences]).to(device)
    return states.flatten(0, 1).index_select(0, scored.rows * ids.shape[1] + lengths[scored.rows] - 1 + scored.places)


def shared_prompts(model: Any, sequences: Sequence[TokenSequence], scored: Scored) -> Tensor:
    """Return the states [N, D] that predict the scored tokens; every distinct prompt is computed once."""
    device = scored.mask.device
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(row.prompt for row in sequences))}
    owners = torch.tensor([prompts[row.prompt] for row in sequences]).to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts]).to(device)
    accepted = inspect.signature(model.forward).parameters
    cache = Cache(layer_class_to_replicate=PromptLayer)
    kept = {"use_cache": True, "cache" if "cache" in accepted else "past_key_values": cache}
    states: Tensor = model(input_ids=padded(list(prompts), device), **kept)[0]
    columns = states.shape[1]
    states = states[torch.arange(len(prompts), device=device), lengths - 1]
    inputs = [row.response[:-1] for row in sequences]  # nothing is predicted from a last token
    width = max(map(len, inputs))
    if width == 0:
        return states.index_select(0, owners[scored.rows])
    for layer in cache.layers:
        layer.hand_out(owners, (columns - lengths).tolist())
    places = torch.arange(columns + width, device=device) - (columns - lengths[owners, None])
    kept["attention_mask"] = (places >= 0).long()
    if "position_ids" in accepted:
        kept["position_ids"] = places[:, columns:]
    answers: Tensor = model(input_ids=padded(inputs, device), **kept)[0]
    later = len(prompts) + scored.rows * width + scored.places - 1
    chosen = torch.where(scored.places == 0, owners[scored.rows], later)
    return torch.cat([states, answers.flatten(0, 1)]).index_select(0, chosen)


class PromptLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [U, heads, columns, size] of prompts, and then what each row sees of its own.

    Sliding-window layers keep all columns too: the model's own mask hides those outside the window.
    """

    _owners: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the prompts' columns; later put each row's prompt before its own columns, without keeping those.

        Under autocast, rotary embeddings leave float32 keys, which attention would cast.
        """
        if torch.is_autocast_enabled(key_states.device.type):
            precision = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(precision), value_states.to(precision)
        if self._owners is None:
            self.is_initialized = True
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        keys, values = (each.index_select(0, self._owners) for each in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def hand_out(self, owners: Tensor, shifts: Sequence[int]) -> None:
        """From now on show row b the prompt `owners[b]`; `shifts` moves each prompt's columns to the right, so that
        all of them end in the last one."""
        self._owners = owners
        if any(shifts):
            self.keys, self.values = (
                torch.stack([prompt.roll(shift, dims=1) for prompt, shift in zip(each, shifts, strict=True)])
                for each in (self.keys, self.values)
            )
