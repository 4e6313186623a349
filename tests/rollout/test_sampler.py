"""What is sampled: the right distribution, from draws that depend on nothing but their address."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError, WorkError
from tepo.policy import Policy
from tepo.policy.sequences import TokenSequence
from tepo.rollout import Response, SamplingConfig, sample

PROMPTS = [[5, 6, 7], [9], [30, 31, 32, 33, 34, 35, 36, 37], [11, 12], [40, 41, 42, 43, 44]]
Make = Callable[..., Policy]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def endless(tiny: Policy, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """The tiny policy without an end-of-sequence token: every response runs to its limit."""
    monkeypatch.setattr(tiny, "eos_ids", ())
    return tiny


def run(policy: Policy, prompts: Any = PROMPTS, *, samples: int = 1, **settings: Any) -> list[list[Response]]:
    draws = settings.pop("draws", range(len(prompts)))
    seed = settings.pop("seed", 0)
    progress = settings.pop("progress", None)
    limits = settings.pop("limits", None)
    on_response = settings.pop("on_response", None)
    return sample(
        policy,
        prompts,
        samples=samples,
        config=SamplingConfig(**settings),
        seed=seed,
        purpose="test",
        draws=draws,
        limits=limits,
        progress=progress,
        on_response=on_response,
    )


def tokens(groups: list[list[Response]]) -> list[list[tuple[int, ...]]]:
    return [[response.token_ids for response in group] for group in groups]


@contextlib.contextmanager
def forwards(policy: Policy) -> Iterator[list[tuple[int, int]]]:
    """Collect (rows, columns) of every forward pass."""
    shapes: list[tuple[int, int]] = []
    handle = policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    handle.remove()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt-neox", "gpt2", "mistral-window", "bloom"])
def test_greedy_equals_generate(random_policy: Make, kind: str) -> None:
    """Left-padded together, with rows leaving and entering, as each prompt alone through `generate`."""
    policy = random_policy(kind)
    policy.eos_ids = ()
    policy.model.generation_config.eos_token_id = None
    found = run(policy, temperature=0.0, max_tokens=12, rows=3)
    for prompt, group in zip(PROMPTS, found, strict=True):
        whole = policy.model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )
        assert list(group[0].token_ids) == whole[0, len(prompt) :].tolist()
    assert len({token for group in found for token in group[0].token_ids}) > 5


def test_samples_follow_the_softmax(random_policy: Make) -> None:
    """Chi-square of 4000 first tokens against the model's own probabilities."""
    policy = random_policy("llama")
    (group,) = run(policy, [[5, 6, 7]], samples=4000, max_tokens=1, temperature=1.5, rows=1000)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    expected = (logits / 1.5).softmax(-1) * 4000
    counts = torch.bincount(torch.tensor([response.token_ids[0] for response in group]), minlength=len(expected))
    often = expected >= 5
    bins = torch.cat([expected[often], expected[~often].sum()[None]])
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    statistic = float(((found - bins) ** 2 / bins).sum())
    freedom = len(bins) - 1
    assert freedom > 10
    assert statistic < freedom + 3.5 * math.sqrt(2 * freedom)


def test_later_tokens_follow_the_softmax_too(endless: Policy) -> None:
    """The mean recorded log-prob of sampled tokens is minus the mean entropy, within five standard errors."""
    groups = run(endless, samples=16, max_tokens=20, temperature=0.8)
    surprise = torch.tensor([[-a for a in response.logp] for group in groups for response in group])
    entropy = torch.tensor([response.entropy for group in groups for response in group])
    gap = surprise - entropy
    assert abs(float(gap.mean())) < 5 * float(gap.std()) / math.sqrt(gap.numel())


def test_recorded_values_equal_the_scorers(endless: Policy) -> None:
    found = [
        response for group in run(endless, samples=3, max_tokens=25, temperature=0.7, rows=4) for response in group
    ]
    sequences = [TokenSequence(response.prompt_ids, response.token_ids) for response in found]
    with torch.no_grad():
        scores = endless.score(sequences, temperature=0.7)
    assert torch.allclose(torch.tensor([response.logp for response in found]), scores.logp, atol=1e-4, rtol=0)
    assert scores.entropy is not None
    assert torch.allclose(torch.tensor([response.entropy for response in found]), scores.entropy, atol=1e-4, rtol=0)


def test_truncation_leaves_the_recorded_values_those_of_the_full_distribution(random_policy: Make) -> None:
    policy = random_policy("llama")
    found = [response for group in run(policy, max_tokens=6, top_p=0.5, top_k=4) for response in group]
    sequences = [TokenSequence(response.prompt_ids, response.token_ids) for response in found]
    with torch.no_grad():
        scores = policy.score(sequences)
    for row, response in enumerate(found):
        assert response.logp == pytest.approx(scores.logp[row, : len(response.logp)].tolist(), abs=1e-4)


def test_temperature_divides_the_logits(endless: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits [1, 0] at temperature 0.5: log-prob -0.126928 of token 0, -2.126928 of token 1."""
    forward = endless.model.forward

    @functools.wraps(forward)
    def two_tokens(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = torch.full_like(output.logits, -math.inf)
        output.logits[..., 0], output.logits[..., 1] = 1.0, 0.0
        return output

    monkeypatch.setattr(endless.model, "forward", two_tokens)
    (group,) = run(endless, [[5]], samples=8, max_tokens=8, temperature=0.5, decoder="plain")
    wanted = {0: -0.126928, 1: -2.126928}
    for response in group:
        assert response.logp == pytest.approx([wanted[token] for token in response.token_ids], abs=1e-6)
        assert response.entropy == pytest.approx([0.365335] * 8, abs=1e-5)
    assert {token for response in group for token in response.token_ids} == {0, 1}


@pytest.mark.parametrize("rows", [1, 4, 7, 64])
def test_the_number_of_rows_changes_nothing(endless: Policy, rows: int) -> None:
    settings: dict[str, Any] = {"samples": 3, "max_tokens": 8, "stop": ("3", "a")}
    assert tokens(run(endless, rows=rows, **settings)) == tokens(run(endless, rows=16, **settings))


def test_order_and_batch_mates_change_nothing(endless: Policy) -> None:
    whole = run(endless, samples=4, max_tokens=10)
    backwards = run(endless, PROMPTS[::-1], samples=4, max_tokens=10, draws=[4, 3, 2, 1, 0])
    assert tokens(backwards[::-1]) == tokens(whole)
    alone = run(endless, [PROMPTS[3]], samples=2, max_tokens=10, draws=[3])
    assert tokens(alone)[0] == tokens(whole)[3][:2]
    assert [(response.draw, response.sample) for response in whole[3]] == [(3, 0), (3, 1), (3, 2), (3, 3)]


def test_a_longer_limit_continues_the_same_response(endless: Policy) -> None:
    short, long = run(endless, max_tokens=5), run(endless, max_tokens=9)
    assert [[ids[:5] for ids in group] for group in tokens(long)] == tokens(short)


def test_draws_differ_by_seed_draw_and_sample(endless: Policy) -> None:
    groups = run(endless, [PROMPTS[0]] * 3, samples=3, max_tokens=12)
    other = run(endless, [PROMPTS[0]], samples=1, max_tokens=12, seed=1)
    found = [ids for group in tokens(groups) for ids in group] + tokens(other)[0]
    assert len(set(found)) == 10


def test_top_k_of_one_is_greedy(random_policy: Make) -> None:
    policy = random_policy("llama")
    assert tokens(run(policy, top_k=1, max_tokens=10)) == tokens(run(policy, temperature=0.0, max_tokens=10))
    assert tokens(run(policy, top_p=1e-6, max_tokens=10)) == tokens(run(policy, temperature=0.0, max_tokens=10))


def test_each_of_several_end_tokens_ends_a_response(tiny: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "eos_ids", ())
    free = run(tiny, samples=8, max_tokens=40)
    ends = (20, 60)
    monkeypatch.setattr(tiny, "eos_ids", ends)
    bound = run(tiny, samples=8, max_tokens=40, rows=8)
    reasons = set()
    for response, full in zip((r for g in bound for r in g), (r for g in free for r in g), strict=True):
        end = next((place + 1 for place, token in enumerate(full.token_ids) if token in ends), 40)
        assert response.token_ids == full.token_ids[:end]
        ended = response.token_ids[-1] in ends
        assert response.stop_reason == ("eos" if ended else "length")
        assert response.text == tiny.decode(response.token_ids[:-1] if ended else response.token_ids)
        assert len(response.logp) == len(response.entropy) == end
        reasons.add(response.token_ids[-1] if ended else None)
    assert reasons == {20, 60, None}


def test_stop_texts_end_a_response(endless: Policy) -> None:
    (free,) = run(endless, [PROMPTS[0]], max_tokens=30, temperature=3.0)[0]
    stop = free.text[11:14]  # one character a token: it spans three
    assert free.text.find(stop) == 11
    (response,) = run(endless, [PROMPTS[0]], max_tokens=30, temperature=3.0, stop=(stop, "never said"))[0]
    assert response.stop_reason == "stop"
    assert response.text == free.text[:11]
    assert response.token_ids == free.token_ids[: len(response.token_ids)]
    assert endless.decode(response.token_ids).endswith(stop)


def test_positions_bound_the_response(random_policy: Make) -> None:
    """A row that has used all positions may wait among others that go on."""
    policy = random_policy("gpt2", max_position_embeddings=16)
    policy.eos_ids = ()
    prompts = [list(range(5, 20)), *([5 + index, 6, 7] for index in range(12))]
    groups = run(policy, prompts, max_tokens=50, rows=16)
    assert [len(group[0].token_ids) for group in groups] == [1] + [13] * 12
    assert {group[0].stop_reason for group in groups} == {"length"}
    assert tokens(run(policy, prompts, max_tokens=50, rows=1)) == tokens(groups)


def test_wrong_input_is_refused_before_work(random_policy: Make) -> None:
    policy = random_policy("llama", max_position_embeddings=16)
    with pytest.raises(InputError, match=r"prompt 1 has 16 tokens and \S+ has 16 positions"):
        run(policy, [[5], [5] * 16])
    with pytest.raises(InputError, match="prompt 0 is empty"):
        run(policy, [[]])
    with pytest.raises(InputError, match="token id 4000"):
        run(policy, [[5, 4000]])
    with pytest.raises(InputError, match="2 prompts but 1 draws"):
        run(policy, [[5], [6]], draws=[0])
    with pytest.raises(InputError, match="samples is 0"):
        run(policy, [[5]], samples=0)
    for limits in ([3], [3, 0]):
        with pytest.raises(InputError, match="limits="):
            run(policy, [[5], [6]], limits=limits)


def test_a_prompt_has_a_limit_of_its_own(endless: Policy) -> None:
    whole = tokens(run(endless, samples=2, max_tokens=9))
    limits = [1, 9, 4, 30, 2]
    bound = tokens(run(endless, samples=2, max_tokens=9, limits=limits, rows=4))
    assert bound == [[one[:limit] for one in group] for group, limit in zip(whole, limits, strict=True)]


def test_responses_are_told_as_they_end(tiny: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "eos_ids", tuple(range(0, 97, 7)))
    told: list[tuple[int, Response]] = []
    groups = run(
        tiny, samples=6, max_tokens=30, rows=30, on_response=lambda prompt, response: told.append((prompt, response))
    )
    lengths = [len(response.token_ids) for _, response in told]
    assert lengths == sorted(lengths)
    assert max(lengths) > min(lengths)
    assert all(groups[prompt][response.sample] is response for prompt, response in told)
    assert len(told) == 30


def test_no_prompts_no_responses(tiny: Policy) -> None:
    assert run(tiny, []) == []


def test_damaged_weights_are_said(random_policy: Make) -> None:
    policy = random_policy("llama")
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(WorkError, match="not finite after 0 sampled tokens of prompt 17"):
        run(policy, [[5]], draws=[17])


def test_each_prompt_is_run_once_for_its_group(endless: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not a group fits into the rows, and split over several forward passes."""
    settings: dict[str, Any] = {"samples": 6, "max_tokens": 4, "rows": 4, "decoder": "plain"}
    whole = tokens(run(endless, **settings))
    monkeypatch.setattr("tepo.rollout.decoder.PREFILL_TOKENS", 9)
    with forwards(endless) as shapes:
        assert tokens(run(endless, **settings)) == whole
    assert sum(rows for rows, columns in shapes if columns > 1) == len(PROMPTS) - 1  # one prompt is a single token
    assert max(rows * columns for rows, columns in shapes) <= 10
    assert max(rows for rows, _ in shapes) <= 4


def test_a_straggler_does_not_keep_finished_rows_computing(tiny: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most responses end at once, the longest runs on: the rows computed are few more than the tokens sampled."""
    monkeypatch.setattr(tiny, "eos_ids", tuple(range(0, 97, 7)))
    with forwards(tiny) as shapes:
        groups = run(tiny, samples=12, max_tokens=60, rows=30, decoder="plain")
    lengths = [len(response.token_ids) for group in groups for response in group]
    assert max(lengths) > 4 * sum(lengths) / len(lengths)
    assert sum(rows for rows, _ in shapes) <= 1.2 * sum(lengths)


def test_modes_and_marks_are_put_back(tiny: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    before = [(module, module.training) for module in model.modules()]
    marks = [weight.requires_grad for weight in model.parameters()]
    calls: list[tuple[int, int]] = []
    run(tiny, max_tokens=3, progress=lambda done, total: calls.append((done, total)))
    with pytest.raises(ZeroDivisionError):
        run(tiny, max_tokens=3, progress=lambda done, total: done // 0)
    assert all(module.training == mode for module, mode in before)
    assert [weight.requires_grad for weight in model.parameters()] == marks
    assert calls == [(done, 5) for done in range(1, 6)]
    model.lm_head.weight.requires_grad_(True)
    model.eval()


def test_low_precision_stays_close_to_the_scorer(endless: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless, "compute_dtype", torch.bfloat16)
    found = [response for group in run(endless, samples=2, max_tokens=10) for response in group]
    monkeypatch.setattr(endless, "compute_dtype", torch.float32)
    sequences = [TokenSequence(response.prompt_ids, response.token_ids) for response in found]
    with torch.no_grad():
        scores = endless.score(sequences)
    gap = torch.tensor([response.logp for response in found]) - scores.logp
    assert 0 < float(gap.abs().mean()) < 0.02
