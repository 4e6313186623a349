"""Help, version, wrong usage, and how failures leave the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ended import Tepo

import tepo
from tepo.cli import app as app_module
from tepo.core.errors import InputError, WorkError

VERBS = ("train", "eval", "sample", "objectives", "explain", "doctor")


def test_help_names_every_verb(tepo_: Tepo) -> None:
    ended = tepo_("--help")
    assert ended.code == 0
    assert all(f"\n  {verb} " in ended.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_says_what_each_option_does(verb: str, tepo_: Tepo) -> None:
    from typer.main import get_command

    root: Any = get_command(app_module.app)
    command = root.commands[verb]
    assert tepo_(verb, "--help").code == 0
    assert all(getattr(parameter, "help", "") for parameter in command.params)


def test_version(tepo_: Tepo) -> None:
    assert tepo_("--version").out.strip() == f"tepo {tepo.__version__}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "trian"),
        (["explain"], "NAME"),
        (["objectives", "--jsn"], "--jsn"),
        (["eval", "m", "s", "--samples", "0"], "--samples"),
        (["sample", "builtin:tiny", "x", "--temperature", "hot"], "--temperature"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what(arguments: list[str], said: str, tepo_: Tepo) -> None:
    ended = tepo_(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_an_unknown_objective_names_the_nearest(tepo_: Tepo) -> None:
    ended = tepo_("explain", "gspo-tokn")
    assert ended.code == 2
    assert ended.err.startswith("error: objective 'gspo-tokn'")
    assert "gspo-token" in ended.err
    assert "Traceback" not in ended.err


def failing(error: Exception) -> Any:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("no such thing"), 2, "error: no such thing\n"),
        (WorkError("it broke\nSafe on disk: a"), 1, "error: it broke\n       Safe on disk: a\n"),
        (ZeroDivisionError("division"), 1, "unexpected ZeroDivisionError: division"),
        (MemoryError(), 1, "unexpected MemoryError: no message"),
        (OSError(28, "No space left on device"), 1, "No space left"),
    ],
)
def test_failures_are_told_without_a_traceback(
    error: Exception, code: int, said: str, tepo_: Tepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo.objectives.objectives", failing(error))
    ended = tepo_("objectives")
    assert ended.code == code
    assert said in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("how", ["option first", "option last", "environment"])
def test_debug_shows_the_traceback(how: str, tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo.objectives.objectives", failing(WorkError("it broke")))
    if how == "environment":
        monkeypatch.setenv("TEPO_DEBUG", "1")
    words = {"option first": ["--debug", "objectives"], "option last": ["objectives", "--debug"]}
    with pytest.raises(WorkError, match="it broke"):
        tepo_(*words.get(how, ["objectives"]))


def test_error_text_cannot_steer_the_terminal(tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo.objectives.objectives", failing(WorkError("bad \x1b[2J text [red]x[/red]")))
    assert tepo_("objectives").err == "error: bad ␛[2J text [red]x[/red]\n"


def test_objectives_list_the_catalogue(tepo_: Tepo) -> None:
    names = [entry.name for entry in tepo.objectives()]
    shown = tepo_("objectives").out
    assert all(name in shown for name in names)
    listed = tepo_("objectives", "--json").json
    assert [entry["name"] for entry in listed if entry["kind"] == "objective"] == names
    assert listed[0]["settings"][0].keys() == {"name", "type", "default", "help", "source", "status"}


def test_explain_shows_formula_parts_settings_and_what_is_inferred(tepo_: Tepo) -> None:
    shown = tepo_("explain", "tepo").out
    assert all(text in shown for text in ("arXiv 2604.12736", "J = ", "FallingEntropy", "kl_coef = 1", "[inferred"))
    record = tepo_("explain", "tepo", "--json").json
    assert record["parts"]["ratio"][0]["kind"] == "SequenceRatio"
    assert record["needs"]["old_entropy"] is True


def test_explain_versus_shows_what_differs(tepo_: Tepo) -> None:
    both = tepo_("explain", "tepo", "--versus", "dapo", "--json").json
    assert set(both["differences"]["parts"]) == {"ratio", "regularizers"}
    assert both["differences"]["settings"]["kl_coef"] == [1.0, "absent"]
    same = tepo_("explain", "grpo", "--versus", "grpo", "--json").json
    assert same["differences"] == {"parts": {}, "settings": {}}
    assert "TokenRatio" in tepo_("explain", "tepo", "--versus", "dapo").out


def test_doctor_reports_versions_extras_and_machine(tepo_: Tepo) -> None:
    facts = tepo_("doctor", "--json").json
    assert facts["tepo"] == tepo.__version__
    assert facts["versions"]["torch"]
    assert facts["device"]["threads"] >= 1
    assert facts["memory"]["disk_free_gib"] > 0
    assert "Machine" in tepo_("doctor").out


def test_doctor_says_which_fast_paths_are_active_and_what_switches_them_off(tepo_: Tepo) -> None:
    from tepo.training.loading import known_keys

    keys = {key for key, _ in known_keys()}
    for arguments in (("doctor", "--json"), ("doctor", "--model", "builtin:tiny", "--json")):
        paths = {path["name"]: path for path in tepo_(*arguments).json["fast_paths"]}
        assert paths["rows without signal left out"]["active"] is True
        for name in ("fused layers in sampling", "rows without padding", "prompts computed once"):
            assert paths[name]["active"] is (True if "--model" in arguments else None)
        for path in paths.values():
            option = path["option"].partition("=")[0]
            assert option in keys or option in ("TEPO_KEEP_MEMORY", "compiled")
    assert "Fast paths" in tepo_("doctor").out
    assert tepo_("doctor", "--model", "no/such/model").code == 2


def test_doctor_says_why_rows_of_a_model_are_padded(tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo.policy.layouts.why_not_packed", lambda *models, **options: "it is odd")
    paths = {path["name"]: path for path in tepo_("doctor", "--model", "builtin:tiny", "--json").json["fast_paths"]}
    for name, option in (("rows without padding", "packing"), ("prompts computed once", "share_prompts")):
        assert paths[name]["active"] is False
        assert paths[name]["detail"].startswith("rows of builtin:tiny are padded")
        assert "it is odd" in paths[name]["detail"]
        assert paths[name]["option"] == f"model.{option}=never"
    in_blocks = paths["attention in blocks in updates"]
    assert (in_blocks["active"], in_blocks["detail"]) == (False, "it gains in bfloat16")


def test_doctor_says_what_to_type_for_what_is_missing(tepo_: Tepo, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "gguf" else found(name))
    facts = tepo_("doctor", "--json").json
    assert facts["extras"]["gguf"]["install"] == "pip install 'tepo[gguf]'"
    assert any("pip install 'tepo[gguf]'" in line for line in facts["advice"])


def test_the_configuration_is_listed_whole_in_help_and_as_json(tepo_: Tepo) -> None:
    from tepo.training.loading import known_keys

    listed = tepo_("train", "--fields", "--json").json
    assert {field["key"] for field in listed} == {key for key, _ in known_keys()}
    assert [field["key"] for field in listed if not field["description"]] == []
    by_key = {field["key"]: field for field in listed}
    assert by_key["optim.lr"] | {"default": 0} == {
        "key": "optim.lr",
        "type": "number > 0",
        "default": 0,
        "required": False,
        "description": by_key["optim.lr"]["description"],
    }
    shown = tepo_("train", "--help").out
    assert "[optim]" in shown
    assert "--resume" in shown
    assert all(f"  {field['key'].split('.')[-1]}: " in shown for field in listed)
    assert json.dumps(by_key["model.path"]["default"]) in shown
