"""A critic beside the policy: its values, what it learns, and how a run with one goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError
from tepo.objectives import objective
from tepo.policy import Policy, PolicyConfig, TokenSequence, ValueModel, load_policy, load_value_model, value_of_policy
from tepo.policy.batching import Layout
from tepo.training.checkpoint import load_checkpoint
from tepo.training.config import OptimConfig
from tepo.training.critic import Critic
from tepo.training.experience import Experience
from tepo.training.learner import Learner
from tepo.training.micro import Budget
from tepo.training.rundir import step_name
from tepo.training.trainer import train
from tepo.training.update import Material, accumulate

from .conftest import MakeConfig
from .test_trainer import Recorder, assert_goes_on_as_if_nothing_happened, metrics_of
from .test_update import material, plan, quiet, recorded

QUIET: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}}


def tiny(dtype: str = "float32") -> Policy:
    # Norms compute in float32, so only equal layouts are exact in float64.
    settings = {"path": "builtin:tiny", "device": "cpu", "dtype": dtype, "packing": "never", "share_prompts": "never"}
    config = PolicyConfig.model_validate(settings)
    return load_policy(config, seed=0)


def shaken(values: ValueModel) -> ValueModel:
    """Give the head weights, so that values differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = values.model["head"].weight
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / weight.numel() ** 0.5)
    return values


def test_a_value_belongs_to_the_state_before_its_token() -> None:
    policy = tiny("float64")
    values = shaken(value_of_policy(policy))
    rows = [TokenSequence((4, 5, 6), (7, 8)), TokenSequence((9,), (10, 11, 12), (True, False, True))]
    found = values.values(rows, width=4)
    assert found.shape == (2, 4)
    head = values.model["head"]
    hidden = policy.model.base_model(input_ids=torch.tensor([[4, 5, 6, 7, 8]])).last_hidden_state
    assert torch.allclose(found[0, :2], head(hidden)[0, 2:4, 0], atol=1e-12)
    hidden = policy.model.base_model(input_ids=torch.tensor([[9, 10, 11, 12]])).last_hidden_state
    assert torch.allclose(found[1, [0, 2]], head(hidden)[0, [0, 2], 0], atol=1e-12)
    assert found[0, 2:].tolist() == [0, 0]
    assert found[1, [1, 3]].tolist() == [0, 0]


def test_a_critic_starts_at_zero_and_shares_nothing_with_the_policy() -> None:
    policy = tiny()
    values = value_of_policy(policy)
    rows = recorded()
    assert bool((values.values(rows) == 0).all())
    shaken(values).values(rows).sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in policy.trainable_parameters())
    own = {value.data_ptr() for value in values.state_tensors().values()}
    assert own.isdisjoint(value.data_ptr() for value in policy.state_tensors().values())


def with_critic(epochs: int = 1) -> tuple[Learner, Critic, Material]:
    """Policy, critic and a prepared rollout batch, all in float64."""
    from tepo.training.loading import check_config

    config = check_config({"objective": {"name": "ppo"}, "train": {"epochs": epochs, "mini_batches": 1}})
    policy = tiny("float64")
    method = objective("ppo", value_coef=1.0)
    learner = Learner(policy, method, OptimConfig(), updates_per_step=1, steps=1)
    critic = Critic(shaken(value_of_policy(policy)), config)
    base = material(policy, dataclasses.replace(objective("grpo", kl_coef=0.0)), config.train)
    old = critic.old_values(
        base.sequences,
        rows=plan([0] * len(base.sequences), config.train, step=1)[0],
        width=base.prepared.batch.mask.shape[1],
        budget=Budget(64, "train.micro_tokens", quiet),
    )
    prepared = method.prepare(base.prepared.batch.replace(advantage=None, old_values=old))
    return learner, critic, dataclasses.replace(base, prepared=prepared, critic=critic)


def test_both_gradients_do_not_depend_on_the_micro_batches() -> None:
    learner, critic, work = with_critic()
    fixed = learner.objective.statistics(work.prepared.batch)
    found = []
    for tokens in (0, 40, 1):
        accumulate(learner, work, work.prepared.batch, fixed, work.sequences, tokens)
        gradients = [p.grad for one in (learner, critic) for p in one.model.trainable_parameters()]
        found.append([gradient.clone() for gradient in gradients if gradient is not None])
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(found[0], other, strict=True))


def test_the_critic_s_gradient_is_that_of_its_loss_alone() -> None:
    """v = v_old at the first update: 0.5 mean (v - R)^2 over all tokens."""
    learner, critic, work = with_critic()
    fixed = learner.objective.statistics(work.prepared.batch)
    accumulate(learner, work, work.prepared.batch, fixed, work.sequences, 0)
    found = [p.grad.clone() for p in critic.model.trainable_parameters() if p.grad is not None]
    critic.zero_grad()
    batch = work.prepared.batch
    assert batch.returns is not None
    error = critic.values(work.sequences) - batch.returns
    (0.5 * error[batch.mask].square().mean()).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad for p in critic.model.trainable_parameters() if p.grad is not None]
    assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["ppo", "instructgpt", "tulu3-rlvr"])
def test_actor_critic_methods_train(tiny_config: MakeConfig, name: str) -> None:
    result = train(tiny_config(objective={"name": name}, train={"preflight": 2}, **QUIET))
    lines = metrics_of(result.folder)
    assert len(lines) == 3
    names = {"loss/value", "value/mean", "value/error", "value/return", "critic/grad/norm", "critic/lr", "grad/norm"}
    assert names <= set(lines[-1])
    assert ("kl/ref" in lines[-1]) == (name != "ppo")
    assert lines[0]["critic/grad/norm"] > 0
    checkpoint = load_checkpoint(result.folder / "checkpoints" / step_name(3))
    assert set(checkpoint.tensors) == {"policy", "policy-optimizer", "critic", "critic-optimizer"}
    assert float(checkpoint.tensors["critic"]["head.weight"].abs().max()) > 0


def test_a_run_with_a_critic_goes_on_as_if_nothing_happened(tiny_config: MakeConfig) -> None:
    changes: dict[str, Any] = {
        "objective": {"name": "instructgpt", "kl_adapt_to": 0.1},
        "critic": {"lr": 3e-3},
        "train": {"steps": 4, "epochs": 2},
        **QUIET,
    }
    last = metrics_of(assert_goes_on_as_if_nothing_happened(tiny_config, **changes).path)[-1]
    assert (last["critic/lr"], last["lr"]) == (3e-3, 1e-3)
    assert last["state/kl_coef"] != 0.02


def test_a_fork_of_a_run_without_a_critic_starts_one(tiny_config: MakeConfig) -> None:
    train(tiny_config(name="parent", objective={"name": "grpo", "kl_coef": 0.0}, **QUIET))
    parent = f"{tiny_config().runs}/parent@2"
    recorder = Recorder()
    train(tiny_config(name="child", objective={"name": "ppo"}, **QUIET), fork=parent, callbacks=[recorder])
    assert recorder.steps == [3]
    assert any("the critic starts anew" in text for text in recorder.messages)


def test_a_group_of_one_is_no_fault_where_nobody_is_compared(tiny_config: MakeConfig) -> None:
    recorder = Recorder()
    config = tiny_config(objective={"name": "ppo"}, train={"steps": 1, "group_size": 1}, **QUIET)
    train(config, callbacks=[recorder])
    assert not any("group_size is 1" in text for text in recorder.messages)


def saved_reward_model(folder: Path, vocabulary: int, labels: int = 1) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        num_labels=labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_critic_starts_from_a_reward_model(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    policy = tiny()
    path = saved_reward_model(tmp_path / "rm", policy.vocabulary)
    values = load_value_model(str(path), policy, PolicyConfig())
    model = AutoModelForSequenceClassification.from_pretrained(path)
    row = TokenSequence((4, 5, 6), (7, 8))
    # The score of a sequence is that of its last token: the value of the state after the prompt is that of token 6.
    wanted = float(model(input_ids=torch.tensor([[4, 5, 6]])).logits.detach())
    assert float(values.values([row]).detach()[0, 0]) == pytest.approx(wanted, rel=1e-5)
    assert len(values.trainable_parameters()) == len(list(model.parameters()))
    assert values.layout == Layout("auto", "auto", pass_tokens=128)
    rows = [row, TokenSequence((4, 5, 6), (9, 10, 11, 12, 13, 14)), TokenSequence((8,), (7,))]
    expected = [values.values([one]).detach()[0] for one in rows]
    values.layout = Layout("always", "always")
    for one, found in zip(expected, values.values(rows).detach(), strict=True):
        torch.testing.assert_close(found[: len(one)], one)


def test_a_critic_starts_from_a_language_model_with_a_head_at_zero(tmp_path: Path) -> None:
    policy = tiny()
    policy.model.save_pretrained(tmp_path / "lm")
    values = load_value_model(str(tmp_path / "lm"), policy, PolicyConfig())
    assert bool((values.values(recorded()) == 0).all())


def test_models_that_cannot_be_critics_are_refused(tmp_path: Path) -> None:
    policy = tiny()
    with pytest.raises(InputError, match=r"critic\.path='nowhere': expected 'start', or a model's folder"):
        load_value_model("nowhere", policy, PolicyConfig())
    other = saved_reward_model(tmp_path / "other", policy.vocabulary + 1)
    with pytest.raises(InputError, match="they must share a tokenizer"):
        load_value_model(str(other), policy, PolicyConfig())
    two = saved_reward_model(tmp_path / "two", policy.vocabulary, labels=2)
    with pytest.raises(InputError, match="cannot be loaded as a value model"):
        load_value_model(str(two), policy, PolicyConfig())


COPY = """
def copied(problems, responses):
    return [float(r[:1] == p.answer) for p, r in zip(problems, responses)]
"""


class Rewards(Recorder):
    """Remembers how often the first character was right."""

    def on_experience(self, step: int, experience: Experience) -> None:
        grades = [grade for group in experience.drawn for grade in group.grades]
        self.rate = sum(grade.passed for grade in grades) / len(grades)


@pytest.mark.slow
def test_ppo_learns_to_copy_a_digit(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """From random weights, which get it right once in a hundred draws: one of four digits is shown and to be said."""
    data, reward = tmp_path / "digits.jsonl", tmp_path / "copied.py"
    data.write_text("".join(json.dumps({"question": str(i), "answer": str(i)}) + "\n" for i in range(4)))
    reward.write_text(COPY)
    recorder = Rewards()
    train(
        tiny_config(
            objective={"name": "ppo", "entropy_coef": 0.1},
            optim={"lr": 5e-4},
            task={"source": str(data), "held_out": 0, "prompt": {"template": "{question}="}},
            reward={"kind": f"{reward}:copied"},
            sampling={"max_tokens": 1},
            train={"steps": 50, "prompts": 4, "group_size": 16, "mini_batches": 1, "epochs": 2},
            log={"rollouts": 0},
            checkpoint={"every": 0, "at_end": False},
            **QUIET,
        ),
        callbacks=[recorder],
    )
    assert recorder.rate > 0.9


def test_instructgpt_trains_on_a_reward_model(tiny_config: MakeConfig, tmp_path: Path) -> None:
    from tepo.policy.tiny import tiny_tokenizer

    path = saved_reward_model(tmp_path / "rm", tiny().vocabulary)
    tiny_tokenizer().save_pretrained(path)
    config = tiny_config(
        objective={"name": "instructgpt"},
        reward={"kind": "model", "path": str(path)},
        critic={"path": str(path)},
        **QUIET,
    )
    lines = metrics_of(train(config).folder)
    assert len(lines) == 3
    assert lines[0]["reward/mean"] not in (0, 1)
