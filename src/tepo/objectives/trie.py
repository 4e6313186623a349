"""Responses of a group as a prefix tree: what a token is worth after what came before it (T-SPMO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.objectives.advantages import EQUAL_REWARDS, scored_groups
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.choice import places


def prefix_nodes(batch: TokenBatch, owner: str) -> tuple[Tensor, Tensor, int]:
    """Return (node before each token, node with it, number of node names): `[B, T]` names of tree nodes.

    Two tokens have the same node if their responses belong to one group and agree up to and including them. Only
    response tokens count: holes (tool output) are passed over. Names outside the mask mean nothing.
    """
    group, _ = group_index(require(batch, "group", owner))
    order = torch.argsort(~batch.mask, dim=1, stable=True)  # response tokens first, in their order
    tokens = require(batch, "token_ids", owner).long().gather(1, order)
    lengths = batch.lengths()
    rows, width = tokens.shape
    alone = torch.arange(rows, device=tokens.device)
    node = group
    nodes = [node]
    for depth in range(width):
        active = (lengths > depth).nonzero()[:, 0]
        found = torch.stack([node[active], tokens[active, depth]], dim=1)
        unique, name = torch.unique(found, dim=0, return_inverse=True)
        if len(unique) == len(active):  # every response is alone from here on
            nodes += [alone + level * rows for level in range(depth + 1, width + 1)]
            break
        node = alone.index_copy(0, active, name)
        nodes.append(node + (depth + 1) * rows)
    packed = torch.stack(nodes, dim=1)
    place = places(batch.mask).clamp_min(0)
    return packed.gather(1, place), packed.gather(1, place + 1), (width + 1) * rows


@dataclass(frozen=True)
class PrefixAdvantage:
    """A_{i,t} = E[R | tokens up to t] - E[R | tokens before t], means over the group's responses that share them.

    0 wherever the group does not branch, and so from the place on where a response is the only one of its prefix:
    few tokens carry credit. The mean before t counts responses that end there.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "group", "token_ids"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B, T]`; a response without a reward (NaN) counts in no mean."""
        rewards, group = scored_groups(batch, "T-SPMO's advantage")
        scored = ~torch.isnan(rewards)
        filled = torch.where(scored, rewards, torch.zeros_like(rewards))
        before, after, n = prefix_nodes(batch, "T-SPMO's advantage")
        counted = batch.mask & scored[:, None]
        # A response is in the node of its group, and in the node of each of its prefixes.
        visited = torch.cat([group_index(group)[0][:, None], after], dim=1)
        present = torch.cat([scored[:, None], counted], dim=1)
        name = torch.where(present, visited, torch.full_like(visited, n)).flatten()
        each = filled[:, None].expand(visited.shape).flatten()
        size = each.new_zeros(n + 1).index_add(0, name, torch.ones_like(each))
        mean = each.new_zeros(n + 1).index_add(0, name, each) / size.clamp_min(1)
        scale = each.new_zeros(n + 1).scatter_reduce(0, name, each.abs(), "amax")
        value = mean[after] - mean[before]
        branches = counted & (size[after] < size[before]) & (value.abs() > EQUAL_REWARDS * scale[before])
        return torch.where(branches, value, torch.zeros_like(value))


@dataclass(frozen=True)
class UniquePrefixes:
    """Every (prefix, next token) with credit carries the policy term once, however many responses share it.

    Of those that do, the response with the smallest row id carries it: their log-probs there are the same. Tokens
    without credit (advantage 0) are left out.
    """

    denominator: Literal["selected", "all"] = "selected"
    terms: Literal["policy", "all"] = "policy"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"group", "token_ids", "row_id"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the tokens that stand for their prefix."""
        owner = "T-SPMO's selection"
        credited = batch.mask & (require(batch, "advantage", owner) != 0)
        _, node, n = prefix_nodes(batch, owner)
        row_id = require(batch, "row_id", owner).long()[:, None].expand(node.shape)
        last = torch.full_like(row_id, torch.iinfo(torch.long).max)
        name = torch.where(credited, node, torch.full_like(node, n)).flatten()
        claim = torch.where(credited, row_id, last).flatten()
        smallest = last.new_full((n + 1,), torch.iinfo(torch.long).max).scatter_reduce(0, name, claim, "amin")
        return credited & (row_id == smallest[node])
