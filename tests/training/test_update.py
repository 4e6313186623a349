"""The gradient of a mini-batch does not depend on how it is cut into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tepo.objectives import Objective, TokenBatch, objective
from tepo.policy import Policy, PolicyConfig, TokenSequence, load_policy
from tepo.policy.batching import PADDED, Layout
from tepo.training.config import OptimConfig, TrainConfig
from tepo.training.experience import score_old
from tepo.training.idle import apart, idle_rows
from tepo.training.learner import Learner
from tepo.training.micro import Budget
from tepo.training.update import Material, accumulate, combine, make_updates, plan, update

GROUPS, SIZE = 4, 4
OBJECTIVES = {
    "tepo": {"kl_coef": 0.5},
    "dr-grpo": {},
    "gspo": {},
    "grpo": {"kl_coef": 0.05},
}


def quiet(text: str) -> None:
    """Say nothing."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(dtype: torch.dtype = torch.float32) -> Policy:
    policy = load_policy(PolicyConfig(path="builtin:tiny", device="cpu"), seed=0)
    if dtype == torch.float64:
        policy.layout = PADDED  # norms compute in float32, so the layouts agree to its digits alone
        policy.model.double()
        assert policy.head is not None
        policy.head = dataclasses.replace(policy.head, dtype=torch.float64)
    return policy


def recorded() -> list[TokenSequence]:
    """Rollouts of 1 to 12 tokens on prompts of 3 to 6."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row in range(GROUPS * SIZE):
        prompt = torch.randint(4, 90, (3 + row // SIZE,), generator=torch.Generator().manual_seed(row // SIZE))
        response = torch.randint(4, 90, (1 + int(torch.randint(12, (1,), generator=generator)),), generator=generator)
        rows.append(TokenSequence(tuple(prompt.tolist()), tuple(response.tolist())))
    return rows


def material(policy: Policy, method: Objective, config: TrainConfig) -> Material:
    """Score the recorded rollouts with the policy as it is and prepare them."""
    rows = recorded()
    lengths = torch.tensor([len(row.response) for row in rows])
    width = int(lengths.max())
    mask = torch.arange(width)[None] < lengths[:, None]
    group = torch.arange(GROUPS * SIZE) // SIZE
    generator = torch.Generator().manual_seed(1)
    blank = TokenBatch(
        logp=torch.zeros(mask.shape),
        mask=mask,
        rewards=torch.randint(0, 2, (len(rows),), generator=generator).float(),
        group=group,
        row_id=torch.arange(len(rows)),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
    )
    order = plan(group.tolist(), config, step=1)
    batch = score_old(
        blank,
        policy,
        rows,
        rows=order[0],
        statistics=method.needs.scores,
        temperature=1.0,
        budget=Budget(0, "x", quiet),
        reference=None,
    )
    if "ref_logp" in method.needs.batch:
        batch = batch.replace(ref_logp=batch.old_logp - 0.1)  # type: ignore[operator]
    return Material(method.prepare(batch), rows, order, 1.0)


def perturb(policy: Policy) -> None:
    """Move the weights a little, as earlier updates would have."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((0.02 * noise).to(parameter.dtype))


def gradient(policy: Policy, method: Objective, found: Material, tokens: int) -> tuple[torch.Tensor, dict[str, float]]:
    learner = Learner(policy, method, OptimConfig(), updates_per_step=1, steps=1)
    batch = found.prepared.batch
    fixed = method.statistics(batch, learner.state)
    parts = accumulate(learner, found, batch, fixed, found.sequences, tokens)
    return torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None]), parts.metrics()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_budget_of_one_row_and_of_everything_agree(name: str, dtype: torch.dtype, tolerance: float) -> None:
    policy, method = tiny(dtype), objective(name, **OBJECTIVES[name])
    found = material(policy, method, TrainConfig(prompts=GROUPS, group_size=SIZE))
    perturb(policy)
    whole, whole_metrics = gradient(policy, method, found, 0)
    assert float(whole.norm()) > 0
    for tokens in (1, 40):
        split, metrics = gradient(policy, method, found, tokens)
        assert float((split - whole).norm() / whole.norm()) < tolerance
        assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("tokens", [0, 40])
@pytest.mark.parametrize("layout", [Layout("always"), Layout("always", "always")], ids=["packed", "shared"])
def test_every_layout_gives_the_same_update(tokens: int, layout: Layout) -> None:
    policy, method = tiny(torch.float64), objective("tepo", kl_coef=0.5)
    found = material(policy, method, TrainConfig(prompts=GROUPS, group_size=SIZE))
    perturb(policy)
    padded, metrics = gradient(policy, method, found, tokens)
    policy.layout = layout
    other, other_metrics = gradient(policy, method, found, tokens)
    assert float((other - padded).norm() / padded.norm()) < 1e-6
    assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["tepo", "grpo"])
def test_parameters_after_five_updates(name: str) -> None:
    ends = []
    config = TrainConfig(prompts=GROUPS, group_size=SIZE, mini_batches=2, epochs=3)
    start = torch.cat([p.detach().flatten().clone() for p in tiny().trainable_parameters()])
    for tokens in (1, 0):
        policy, method = tiny(), objective(name, **OBJECTIVES[name])
        learner = Learner(policy, method, OptimConfig(lr=1e-4), updates_per_step=6, steps=1)
        found = material(policy, method, config)
        every = [rows for epoch in found.plan for rows in epoch][:5]
        budget = Budget(tokens, "x", quiet)
        for index, rows in enumerate(every):
            update(learner, found, rows, budget=budget, first=index == 0)
        ends.append(torch.cat([p.detach().flatten() for p in policy.trainable_parameters()]))
    movement = (ends[0] - start).norm()
    assert float(movement) > 0
    assert float((ends[0] - ends[1]).norm() / movement) < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("packing", "share"), [("never", "never"), ("auto", "auto"), ("always", "never"), ("always", "always")]
)
def test_nothing_is_masked_and_no_ratio_moves_at_equal_weights(dtype: Any, packing: Any, share: Any) -> None:
    """The first update's values are bit for bit the old ones: same rows in the same company."""
    policy = load_policy(
        PolicyConfig(path="builtin:tiny", device="cpu", dtype=dtype, packing=packing, share_prompts=share), seed=0
    )
    method = objective("tepo", kl_coef=1.0)
    config = TrainConfig(prompts=GROUPS, group_size=SIZE, mini_batches=2, micro_tokens=60)
    rows = recorded()
    found = material(policy, method, config)
    batch = score_old(
        found.prepared.batch,
        policy,
        rows,
        rows=found.plan[0],
        statistics=method.needs.scores,
        temperature=1.0,
        budget=Budget(60, "x", quiet),
        reference=None,
    )
    found = dataclasses.replace(found, prepared=dataclasses.replace(found.prepared, batch=batch))
    learner = Learner(policy, method, OptimConfig(), updates_per_step=1, steps=1)
    metrics = update(learner, found, found.plan[0][0], budget=Budget(60, "x", quiet), first=True)
    assert metrics["mask/kl"] == 0.0
    assert (metrics["ratio/min"], metrics["ratio/max"]) == (1.0, 1.0)
    assert metrics["kl/old"] == 0.0
    assert metrics["entropy/change"] == 0.0


def test_out_of_memory_starts_the_mini_batch_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails in the middle of a mini-batch leaves the same update as none."""
    ends = []
    for fails in (False, True):
        policy, method = tiny(), objective("tepo")
        learner = Learner(policy, method, OptimConfig(lr=1e-3), updates_per_step=1, steps=1)
        found = material(policy, method, TrainConfig(prompts=GROUPS, group_size=SIZE))
        if fails:
            score = policy.score

            def limited(rows: list[TokenSequence], score: object = score, **rest: object) -> object:
                if sum(map(len, rows)) > 60:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return score(rows, **rest)  # type: ignore[operator]

            monkeypatch.setattr(policy, "score", limited)
        said: list[str] = []
        update(learner, found, range(GROUPS * SIZE), budget=Budget(0, "train.micro_tokens", said.append), first=True)
        assert bool(said) == fails
        ends.append(torch.cat([p.detach().flatten() for p in policy.trainable_parameters()]))
    assert float((ends[0] - ends[1]).abs().max()) < 1e-4


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    policy, method = tiny(), objective("tepo")
    learner = Learner(policy, method, OptimConfig(lr=1e-3), updates_per_step=1, steps=1)
    before = {name: value.clone() for name, value in policy.state_tensors().items()}
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert learner.apply_gradients()["update/skipped"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in policy.state_tensors().items())
    assert learner.updates == 1


def test_step_metrics_are_means_and_extremes_over_updates() -> None:
    history = [
        {"loss": 1.0, "ratio/max": 1.0, "ratio/min": 0.5, "mask/kl": 0.0},
        {"loss": 3.0, "ratio/max": 2.0, "ratio/min": 0.9, "mask/kl": 0.2},
    ]
    assert combine(history) == {
        "loss": 2.0,
        "ratio/max": 2.0,
        "ratio/min": 0.5,
        "mask/kl": 0.1,
        "last/ratio/max": 2.0,
        "last/mask/kl": 0.2,
        "updates": 2.0,
    }


def test_updates_follow_the_plan() -> None:
    policy, method = tiny(), objective("tepo")
    config = TrainConfig(prompts=GROUPS, group_size=SIZE, mini_batches=2, epochs=2)
    learner = Learner(policy, method, OptimConfig(lr=1e-4), updates_per_step=4, steps=1)
    found = material(policy, method, config)
    assert [len(epoch) for epoch in found.plan] == [2, 2]
    learned = make_updates(learner, found, budget=Budget(0, "x", quiet))
    assert learner.updates == 4
    assert learned.metrics["updates"] == 4.0
    assert learned.trained_tokens == 2 * sum(len(row.response) for row in found.sequences)
    assert learned.entropy is not None
    assert bool(torch.isfinite(learned.logp[found.prepared.batch.mask]).all())


def equal_rewards(found: Material, groups: int, method: Objective) -> Material:
    """Return the material with equal rewards in the first groups, prepared anew."""
    batch = found.prepared.batch
    assert batch.rewards is not None
    rewards = batch.rewards.clone()
    rewards[: groups * SIZE] = 1.0
    prepared = method.prepare(batch.replace(rewards=rewards, advantage=None, informative=None))
    return dataclasses.replace(found, prepared=prepared)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_that_can_change_nothing_are_not_computed_and_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, computed, seen = [], [], []
    for skip in (False, True):
        policy, method = tiny(torch.float64), objective(name, **OBJECTIVES[name])
        config = TrainConfig(prompts=GROUPS, group_size=SIZE)
        found = equal_rewards(material(policy, method, config), 2, method)
        idle = idle_rows(method, found.prepared.batch, method.init_state())
        found = dataclasses.replace(found, idle=idle if skip else frozenset())
        perturb(policy)
        rows: list[int] = []
        score = policy.score

        def counted(part: list[TokenSequence], *, score: Any = score, rows: Any = rows, **rest: Any) -> Any:
            rows.append(len(part))
            return score(part, **rest)

        monkeypatch.setattr(policy, "score", counted)
        learner = Learner(policy, method, OptimConfig(lr=1e-3), updates_per_step=1, steps=1)
        learned = make_updates(learner, found, budget=Budget(0, "x", quiet))
        seen.append((idle, learned.metrics))
        computed.append(sum(rows))
        ends.append(torch.cat([p.detach().flatten() for p in policy.trainable_parameters()]))
    moving = GROUPS * SIZE if name == "grpo" else (GROUPS - 2) * SIZE  # its KL holds every row
    assert computed == [GROUPS * SIZE, moving]
    assert float((ends[0] - ends[1]).norm()) < 1e-6
    for metric in ("loss", "grad/norm", "advantage/mean", "clip/high"):
        assert seen[1][1].get(metric) == pytest.approx(seen[0][1].get(metric), rel=1e-6, abs=1e-9)


def test_the_moments_decay_where_no_row_can_change_anything() -> None:
    ends = []
    for skip in (False, True):
        policy, method = tiny(), objective("dapo")
        config = TrainConfig(prompts=GROUPS, group_size=SIZE)
        first = material(policy, method, config)
        nothing = equal_rewards(first, GROUPS, method)
        idle = frozenset(range(GROUPS * SIZE))
        assert idle_rows(method, nothing.prepared.batch, {}) == idle
        learner = Learner(policy, method, OptimConfig(lr=1e-3), updates_per_step=2, steps=1)
        for found in (first, dataclasses.replace(nothing, idle=idle if skip else frozenset())):
            metrics = update(learner, found, found.plan[0][0], budget=Budget(0, "x", quiet), first=True)
        assert metrics["grad/norm"] == 0.0
        assert metrics["loss"] == 0.0
        ends.append(torch.cat([p.detach().flatten() for p in policy.trainable_parameters()]))
    assert torch.equal(ends[0], ends[1])


def test_skipped_rows_count_in_metrics_with_the_old_policy_s_values() -> None:
    policy, method = tiny(), objective("dapo")
    found = equal_rewards(material(policy, method, TrainConfig(prompts=GROUPS, group_size=SIZE)), 2, method)
    found = dataclasses.replace(found, idle=idle_rows(method, found.prepared.batch, {}))
    perturb(policy)
    learner = Learner(policy, method, OptimConfig(), updates_per_step=1, steps=1)
    learned = make_updates(learner, found, budget=Budget(0, "x", quiet))
    batch = found.prepared.batch
    assert batch.old_entropy is not None
    assert batch.old_logp is not None
    assert learned.entropy is not None
    assert torch.equal(learned.logp[: 2 * SIZE], batch.old_logp[: 2 * SIZE])
    assert learned.metrics["entropy/new"] == pytest.approx(float(learned.entropy[batch.mask].mean()), rel=1e-5)
    assert torch.equal(learned.entropy[: 2 * SIZE], batch.old_entropy[: 2 * SIZE])
    ratio = (learned.logp - batch.old_logp).exp()[batch.mask]
    assert learned.metrics["ratio/mean"] == pytest.approx(float(ratio.mean()), rel=1e-5)


def test_old_values_of_skipped_rows_are_scored_apart() -> None:
    assert apart([3, 1, 2, 0], {1, 3}) == [[2, 0], [3, 1]]
    assert apart([0, 1], set()) == [[0, 1]]
    assert apart([0, 1], {0, 1, 2}) == [[0, 1]]
