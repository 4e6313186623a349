"""Groups of responses sampled from a policy, many at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from tepo.core.errors import InputError, WorkError
from tepo.rollout.choice import ChooseTokens
from tepo.rollout.choosing import choice_for, decoder_for
from tepo.rollout.config import SamplingConfig
from tepo.rollout.decoder import DecodedRows, Decoder
from tepo.rollout.draws import uniforms
from tepo.rollout.response import Response, StopReason
from tepo.rollout.stopping import StopTexts
from tepo.rollout.waiting import Growing, Waiting

if TYPE_CHECKING:
    from tepo.policy import Policy

WORTH_A_COPY = 8
"""Waiting responses enter once one row in this many is free; so do finished rows leave, where that copies the cache."""


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    config: SamplingConfig,
    seed: int,
    purpose: str,
    draws: Sequence[int],
    limits: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_response: Callable[[int, Response], None] | None = None,
) -> list[list[Response]]:
    """Sample `samples` responses to each prompt.

    The random numbers of response (i, j) are a function of (seed, purpose, draws[i], j) alone, so what is drawn does
    not depend on the order of prompts, on `config.rows` or on other responses; log-probs can differ in the last
    digits with the shape of the batch.

    Args:
        policy: the model, its tokenizer and its compute context.
        prompts: token ids of each prompt, at least one and fewer than the policy's positions.
        samples: responses to each prompt; the prompt is run through the model once for all of them.
        config: temperature, truncation, lengths, stop texts, rows decoded at once.
        seed: the run's seed.
        purpose: what the responses are for, such as "rollout" or "evaluation".
        draws: index of each prompt in the run.
        limits: longest response to each prompt, where it is less than `config.max_tokens`.
        progress: called with (finished, all) responses whenever some have finished.
        on_response: called with the index of its prompt and a response as soon as it has ended.

    Returns:
        For each prompt its responses, in the order of `prompts` and of sample index. A response that fills the
        positions its prompt leaves ends there with stop reason "length".

    Raises:
        InputError: a prompt is empty, too long or holds unknown ids; the numbers of prompts and draws differ; the
            model's cache is of a kind the sampler cannot use.
        WorkError: the model's logits are not numbers.
    """
    _check(policy, prompts, samples, draws, limits)
    if not prompts:
        return []
    groups: list[list[Growing]] = []
    for index, (prompt, draw) in enumerate(zip(prompts, draws, strict=True)):
        limit = min(config.max_tokens, policy.max_positions - len(prompt))
        limit = limit if limits is None else min(limit, limits[index])
        groups.append([Growing(index, tuple(prompt), limit, draw, j) for j in range(samples)])
    longest_first = sorted(groups, key=lambda group: -len(group[0].prompt_ids))  # memory peaks at the start
    stops = StopTexts(config.stop, policy.decode)
    run = _Run(config, seed, purpose, frozenset(policy.eos_ids), stops, choice_for(policy, config))
    positions = max(len(group[0].prompt_ids) + group[0].limit for group in groups)
    responses: list[dict[int, Response]] = [{} for _ in prompts]
    finished = 0
    with _sampling(policy.model), policy.compute_context():
        decoder = decoder_for(policy, config, positions)
        waiting = Waiting(decoder, [growing for group in longest_first for growing in group])
        for growing in _decode(decoder, waiting, run):
            ended = responses[growing.group][growing.sample] = _response(growing, run, policy)
            if on_response is not None:
                on_response(growing.group, ended)
            finished += 1
            if progress is not None:
                progress(finished, len(prompts) * samples)
    return [[group[sample] for sample in range(samples)] for group in responses]


@dataclass(frozen=True)
class _Run:
    """What all responses of one call share."""

    config: SamplingConfig
    seed: int
    purpose: str
    eos_ids: frozenset[int]
    stops: StopTexts
    choose: ChooseTokens

    def uniform(self, growing: Growing) -> float:
        """Return the draw of the response's next token; a finished response has none and gets zero."""
        if growing.stop_reason is not None or self.config.greedy:
            return 0.0
        if not growing.uniforms:
            drawn = uniforms(self.seed, self.purpose, growing.draw, growing.sample, growing.limit)
            growing.uniforms = drawn.tolist()
        return growing.uniforms[len(growing.token_ids)]

    def stop_reason(self, growing: Growing) -> StopReason | None:
        """Return why the response ends with its last token, if it does."""
        if growing.token_ids[-1] in self.eos_ids:
            return "eos"
        if self.stops.completed(growing.token_ids):
            return "stop"
        return "length" if len(growing.token_ids) == growing.limit else None


def _decode(decoder: Decoder, waiting: Waiting, run: _Run) -> Iterator[Growing]:
    """Run the decoding loop until every response has a stop reason; yield each when it has."""
    batch, parts = waiting.start(run.config.rows)  # batch[b] is the response that row b belongs to
    rows = decoder.gather(parts)
    while True:
        growing = [one for one in batch if one.stop_reason is None]
        tokens = _append_tokens(rows, batch, run)
        yield from (one for one in growing if one.stop_reason is not None)
        live = [index for index, one in enumerate(batch) if one.stop_reason is None]
        if not live and not waiting:
            return
        ended = len(batch) - len(live)
        if not waiting and (WORTH_A_COPY * ended >= len(batch) or (ended and decoder.keeps_in_place)):
            batch = [batch[index] for index in live]
            tokens = [tokens[index] for index in live]
            rows = decoder.keep(rows, live)
        if live:
            decoder.advance(rows, tokens)
        free = [index for index, one in enumerate(batch) if one.stop_reason is not None]
        if waiting and WORTH_A_COPY * len(free) >= len(batch):
            started, parts = waiting.start(len(free))
            rows = decoder.fill(rows, free, parts)
            for place, one in zip(free, started, strict=False):
                batch[place] = one


def _append_tokens(rows: DecodedRows, batch: Sequence[Growing], run: _Run) -> list[int]:
    """Choose the next token of every row, append it to the responses that still grow, and return all of them."""
    tokens, logp, entropy = run.choose(rows.logits, [run.uniform(growing) for growing in batch])
    for growing, token, *values in zip(batch, tokens, logp, entropy, strict=True):
        if growing.stop_reason is None:
            _append(growing, token, *values)
            growing.stop_reason = run.stop_reason(growing)
            if growing.stop_reason is not None:
                growing.uniforms = ()  # a call may sample many long responses
    return tokens


def _append(growing: Growing, token: int, logp: float, entropy: float) -> None:
    if not math.isfinite(logp):
        raise WorkError(
            f"the policy's logits are not finite after {len(growing.token_ids)} sampled tokens of prompt "
            f"{growing.draw}: its weights are damaged or training has diverged; go back to a checkpoint and lower "
            "the learning rate"
        )
    growing.token_ids.append(token)
    growing.logp.append(logp)
    growing.entropy.append(entropy)


def _response(growing: Growing, run: _Run, policy: Policy) -> Response:
    """Freeze a finished response and decode its text."""
    spoken = growing.token_ids[:-1] if growing.stop_reason == "eos" else growing.token_ids
    return Response(
        prompt_ids=growing.prompt_ids,
        token_ids=tuple(growing.token_ids),
        text=run.stops.cut(policy.decode(spoken)),
        logp=tuple(growing.logp),
        entropy=tuple(growing.entropy),
        stop_reason=growing.stop_reason or "length",
        draw=growing.draw,
        sample=growing.sample,
    )


def _check(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    samples: int,
    draws: Sequence[int],
    limits: Sequence[int] | None,
) -> None:
    """Raise InputError for what cannot be sampled from."""
    if limits is not None and (len(limits) != len(prompts) or min(limits, default=1) < 1):
        raise InputError(
            f"limits={list(limits)[:8]}: expected one number of at least 1 for each of {len(prompts)} prompts"
        )
    if samples < 1:
        raise InputError(f"samples is {samples}: at least 1 response to each prompt is needed")
    if len(draws) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(draws)} draws: give the index of each prompt in the run")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {index} is empty: a prompt needs at least one token")
        if len(prompt) >= policy.max_positions:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens and {policy.name} has {policy.max_positions} positions, "
                "of which the response needs at least one: shorten the prompt or set task.max_prompt_tokens"
            )
        if min(prompt) < 0 or max(prompt) >= policy.vocabulary:
            raise InputError(
                f"prompt {index} holds the token id {max(prompt) if min(prompt) >= 0 else min(prompt)}; "
                f"{policy.name} knows 0 to {policy.vocabulary - 1}: encode prompts with the policy's own tokenizer"
            )


@contextlib.contextmanager
def _sampling(model: nn.Module) -> Iterator[None]:
    """Run without gradients, without dropout and without gradient checkpointing; put everything back afterwards.

    Autocast keeps its low-precision copy of a weight from one step to the next only where the weight requires a
    gradient, and not in inference mode; otherwise it would copy the whole model at every step. So frozen weights are
    marked for the time being, under `no_grad`, where the mark has no other effect.
    """
    training = [module for module in model.modules() if module.training]
    frozen = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    for module in training:
        module.training = False
    for weight in frozen:
        weight.requires_grad = True
    try:
        with torch.no_grad():
            yield
    finally:
        for weight in frozen:
            weight.requires_grad = False
        for module in training:
            module.training = True
