"""From token sequences to the states that predict their scored tokens: one pass over a table of whole rows, or over
rows one behind the other, with or without the prompts that they have in common computed once.

Loads transformers: imported where a pass is made, not by `tepo.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tepo.policy.attention_interface import attending_within, the_same_without_gradient
from tepo.policy.batching import Layout, extent_of
from tepo.policy.packing import pack
from tepo.policy.sequences import Scored, TokenSequence, padded


def predicting_states(model: Any, sequences: Sequence[TokenSequence], scored: Scored, layout: Layout) -> Tensor:
    """Return the states [N, D] that predict the scored tokens, from a transformers model's first output [B, L, D]."""
    way = layout.way(extent_of(sequences))
    with the_same_without_gradient():
        if way == "padded":
            return padded_pass(model, sequences, scored)
        return packed_pass(model, sequences, scored, share=way == "shared")


def padded_pass(model: Any, sequences: Sequence[TokenSequence], scored: Scored) -> Tensor:
    """Return the states [N, D] that predict the scored tokens, from a table of rows padded on the right."""
    device = scored.mask.device
    ids = padded([(*sequence.prompt, *sequence.response[:-1]) for sequence in sequences], device)
    states: Tensor = model(input_ids=ids, use_cache=False)[0]
    lengths = torch.tensor([len(sequence.prompt) for sequence in sequences]).to(device)
    return states.flatten(0, 1).index_select(0, scored.rows * ids.shape[1] + lengths[scored.rows] - 1 + scored.places)


def packed_pass(model: Any, sequences: Sequence[TokenSequence], scored: Scored, *, share: bool) -> Tensor:
    """Return the states [N, D] that predict the scored tokens, from rows one behind the other; with `share` every
    distinct prompt is there once. The model's attention must be that of `attention_interface`."""
    packed = pack(sequences, share=share, device=scored.mask.device)
    with attending_within(packed):
        states: Tensor = model(input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False)[0]
    return states.squeeze(0).index_select(0, packed.predicting(scored))
