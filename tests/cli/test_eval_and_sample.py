"""`tepo eval` and `tepo sample` on the tiny model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from ended import Tepo

from tepo.cli.eval import split_words
from tepo.cli.sample import Manner, asked_like
from tepo.core.errors import InputError
from tepo.evaluation import Evaluation
from tepo.tasks import Problem

SMALL = ("--max-tokens", "2", "--limit", "3")


def test_eval_prints_a_table_with_intervals(tepo_: Tepo) -> None:
    ended = tepo_("eval", "builtin:tiny", "arithmetic", "-n", "2", *SMALL)
    assert ended.code == 0, ended.err
    assert all(name in ended.out for name in ("avg@2", "pass@1", "pass@2", "maj@2", "95 % interval"))
    assert "3 distinct questions of 3, 2 samples each, temperature 1.0" in ended.out


def test_eval_of_a_file_needs_no_columns_and_writes_every_result(tepo_: Tepo, workplace: Path) -> None:
    rows = [{"problem": f"What is {n} + 1?", "solution": rf"It is \boxed{{{n + 1}}}."} for n in range(3)]
    (workplace / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = tepo_("eval", "builtin:tiny", "set.jsonl", "-n", "2", "--max-tokens", "2", "--json", "--out", "r.jsonl")
    assert ended.code == 0, ended.err
    assert ended.json["source"] == "set.jsonl"
    assert ended.json["settings"]["sampling"]["max_tokens"] == 2
    assert ended.json["pass_at"].keys() == {"1", "2"}
    written = Evaluation.read(workplace / "r.jsonl")
    assert [question.answer for question in written.questions] == ["1", "2", "3"]
    assert "question in column 'problem'" in ended.err


def test_eval_takes_settings_of_its_sections(tepo_: Tepo) -> None:
    words = ("arithmetic", "task.options.digits=[1,1]", "sampling.top_k=1", "--temperature", "0.5", "--k", "2")
    ended = tepo_("eval", "builtin:tiny", *words, "-n", "2", *SMALL, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["settings"]["sampling"] | {"rows": 0, "max_tokens": 0, "stop": []} == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 1,
        "decoder": "auto",
        "max_tokens": 0,
        "stop": [],
        "rows": 0,
        "em_inf": None,
    }
    assert ended.json["pass_at"].keys() == {"2"}


def test_eval_minimises_entropy_while_decoding(tepo_: Tepo) -> None:
    ended = tepo_("eval", "builtin:tiny", "arithmetic", "sampling.em_inf.threshold=0.1", *SMALL, "--json")
    assert ended.code == 0, ended.err
    em_inf = ended.json["settings"]["sampling"]["em_inf"]
    assert em_inf == {"steps": 3, "lr": 0.1, "threshold": 0.1, "kl_coef": 0.05}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["builtin:tiny"], "SOURCE is missing"),
        (["builtin:tiny", "a.jsonl", "b.jsonl"], "expected one source"),
        (["builtin:tiny", "nowhere.jsonl"], "nowhere.jsonl"),
        (["builtin:tiny", "arithmetic", "optim.lr=1"], "optim.lr does not apply"),
        (["builtin:tiny", "arithmetic", "task.source=x"], "task.source does not apply"),
        (["builtin:tiny", "arithmetic", "--k", "4"], "--samples 4"),
        (["builtin:tiny", "arithmetic", "task.held_out=0"], "holds no questions out"),
        (["builtin:tny", "arithmetic"], "builtin:tiny"),
        (["builtin:tiny", "arithmetic", "--out", "."], "is a folder"),
    ],
)
def test_wrong_input_of_eval_exits_with_2(arguments: list[str], said: str, tepo_: Tepo, workplace: Path) -> None:
    ended = tepo_("eval", *arguments)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert said in ended.err


def test_sources_are_told_from_settings() -> None:
    assert split_words(["a=b.jsonl", "task.limit=3"]) == ("a=b.jsonl", ["task.limit=3"])
    with pytest.raises(InputError, match="does not apply"):
        split_words(["model.path=x"])


def test_sample_repeats_itself_and_counts_tokens(tepo_: Tepo) -> None:
    words = ("sample", "builtin:tiny", "1 + 2 =", "-n", "2", "--max-tokens", "3", "--json")
    first, second = tepo_(*words).json, tepo_(*words).json
    assert first == second
    assert [len(one["token_ids"]) for one in first] == [one["tokens"] for one in first]
    assert len(first) == 2
    assert tepo_(*words, "--seed", "1").json != first


def test_sample_shows_text_without_letting_it_steer(tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo.policy import Policy

    monkeypatch.setattr(Policy, "decode", lambda self, ids, special=False: "\x1b[31m[red]x[/red]")
    ended = tepo_("sample", "builtin:tiny", "1", "--max-tokens", "1")
    assert ended.out == "␛[31m[red]x[/red]\n"
    assert "cut at the length limit" in ended.err


def test_sample_reads_the_prompt_from_standard_input(tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 2 ="))
    piped = tepo_("sample", "builtin:tiny", "--max-tokens", "3", "--json").json
    assert piped == tepo_("sample", "builtin:tiny", "1 + 2 =", "--max-tokens", "3", "--json").json


def test_sample_talks_at_a_terminal(tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["1 + 2 =", "/new", "3 + 4 =", ""])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    ended = tepo_("sample", "builtin:tiny", "--max-tokens", "2", "--temperature", "0")
    assert ended.code == 0, ended.err
    assert len(ended.out.strip().splitlines()) == 3
    refused = tepo_("sample", "builtin:tiny", "--json")
    assert refused.code == 2
    assert "--json needs a PROMPT" in refused.err


def test_asking_like_a_task_needs_a_run(tepo_: Tepo) -> None:
    ended = tepo_("sample", "builtin:tiny", "1", "--ask")
    assert ended.code == 2
    assert "--ask needs a run" in ended.err
    assert "leave --raw" in tepo_("sample", "builtin:tiny", "1", "--ask", "--raw").err


def test_a_question_is_asked_as_the_task_asks_it() -> None:
    problem = Problem("1", ({"role": "user", "content": "2 + 2 = 4\n1 + 1 = 2\n2 + 2 ="},), "2 + 2", "4")
    assert asked_like(problem, "7 * 8") == [{"role": "user", "content": "2 + 2 = 4\n1 + 1 = 2\n7 * 8 ="}]
    hidden = Problem("1", ({"role": "user", "content": "What is it?"},), "2 + 2", "4")
    with pytest.raises(InputError, match="word for word"):
        asked_like(hidden, "7 * 8")


def test_a_conversation_remembers_and_bare_text_does_not() -> None:
    turns = ["a", "b", "c"]
    assert [message["role"] for message in Manner(True, "s").messages(turns)] == ["system", "user", "assistant", "user"]
    assert Manner(False).messages(turns) == [{"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("option", "value"), [("--top-p", "0"), ("--top-p", "2"), ("--dtype", "int8"), ("--device", "tpu9")]
)
def test_wrong_settings_of_sample_exit_with_2(option: str, value: str, tepo_: Tepo) -> None:
    ended = tepo_("sample", "builtin:tiny", "1", option, value)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert "Traceback" not in ended.err
