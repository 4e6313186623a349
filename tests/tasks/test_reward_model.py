"""Reward models: the score is that of the last token, whatever stands beside it in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError
from tepo.policy.tiny import CHARACTERS, SPECIAL, tiny_tokenizer
from tepo.tasks import Grader, Problem, RewardConfig
from tepo.tasks.rewards.model import RewardModel

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"


def save(folder: Path, *, labels: int = 1, template: str | None = None, positions: int = 64, pad: int = 2) -> Path:
    """Write a small random reward model over characters; its padding id is its end-of-sequence id, as is common."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        pad_token_id=pad,
        eos_token_id=2,
        num_labels=labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def asked(question: str) -> Problem:
    return Problem(question, ({"role": "user", "content": question},), question, None, {})


def alone(folder: Path, text: str) -> float:
    """What transformers says of one text by itself."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = tiny_tokenizer()(text)["input_ids"]
    return float(model(input_ids=torch.tensor([ids])).logits.detach())


def test_the_score_is_that_of_the_whole_text(tmp_path: Path) -> None:
    folder = save(tmp_path / "rm")
    texts = [("1 + 1 =", " 2"), ("a", ""), ("what is it?", " a long answer, longer than the others")]
    found = RewardModel(str(folder)).scores([asked(q) for q, _ in texts], [r for _, r in texts])
    assert found == pytest.approx([alone(folder, q + r) for q, r in texts], abs=1e-6)
    assert len(set(found)) == 3


def test_the_order_and_the_company_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = RewardModel(str(save(tmp_path / "rm")))
    problems, responses = [asked(str(i)) for i in range(7)], ["x" * (i * 5 % 7) for i in range(7)]
    whole = reward.scores(problems, responses)
    monkeypatch.setattr("tepo.tasks.rewards.model.ROWS", 2)
    back = reward.scores(problems[::-1], responses[::-1])[::-1]
    assert whole == pytest.approx(back, abs=1e-6)
    assert reward.scores([], []) == []


def test_a_conversation_is_written_with_the_model_s_own_template(tmp_path: Path) -> None:
    folder = save(tmp_path / "rm", template=TEMPLATE)
    found = RewardModel(str(folder)).scores([asked("hi")], ["yes"])
    assert found == pytest.approx([alone(folder, "u:hi;a:yes;")], abs=1e-6)


def test_a_reward_model_grades_alone_and_in_a_sum(tmp_path: Path) -> None:
    folder = str(save(tmp_path / "rm", positions=32))
    problem = Problem("p", ({"role": "user", "content": "2 ="},), "2 =", "2", {})
    with Grader(RewardConfig(kind="model", path=folder)) as grader:
        good, long = grader.grade([problem] * 2, ["2", "2" * 40])
    score = alone(Path(folder), "2 =2")
    assert good.score == pytest.approx(score, abs=1e-6)
    assert good.parts == {"model": pytest.approx(score, abs=1e-6)}
    assert (long.score, long.error) == (0.0, "longer than the reward model's positions")
    parts: list[dict[str, Any]] = [{"kind": "numeric"}, {"kind": "model", "path": folder, "weight": 0.5, "name": "rm"}]
    with Grader(RewardConfig.model_validate({"parts": parts}), device="cpu") as grader:
        (both,) = grader.grade([problem], ["2"])
    assert both.score == pytest.approx(1 + 0.5 * score, abs=1e-6)
    assert both.passed
    assert both.parts == {"numeric": 1.0, "rm": pytest.approx(score, abs=1e-6)}


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"reward\.path: the reward 'model' needs the folder"):
        Grader(RewardConfig(kind="model"))
    with pytest.raises(InputError, match=r"is read by reward\.kind='model' only, not by 'math'"):
        Grader(RewardConfig(kind="math", path="somewhere"))
    with pytest.raises(InputError, match=r"reward\.path='nowhere': expected the folder"):
        Grader(RewardConfig(kind="model", path="nowhere"))
    with pytest.raises(InputError, match="has 2 labels; a reward model has one"):
        RewardModel(str(save(tmp_path / "two", labels=2)))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    tiny_tokenizer().save_pretrained(tmp_path / "lm")
    with pytest.raises(InputError, match=r"lacks 1 weights, first 'score\.weight'"):
        RewardModel(str(tmp_path / "lm"))
