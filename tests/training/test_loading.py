"""Configuration: files, overrides, and errors that name the key, its origin and the nearest known one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.core.errors import InputError
from tepo.training.loading import check_config, known_keys, load_config, parse_override
from tepo.training.rundir import plain_config
from tepo.training.toml import dump_toml


def test_file_and_overrides_in_order(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "a"\n[optim]\nlr = 1e-5\n[objective]\nname = "grpo"\n')
    config = load_config(file, ["optim.lr=2e-6", "train.steps=7", "name=b", "optim.lr=3e-6", "objective.kl_coef=0.1"])
    assert (config.name, config.optim.lr, config.train.steps) == ("b", 3e-6, 7)
    assert config.objective.build().name == "grpo"
    assert config.objective.overrides == {"kl_coef": 0.1}


def test_text_values_need_no_quotes() -> None:
    assert parse_override("model.path=Qwen/Qwen2.5-0.5B") == ("model.path", "Qwen/Qwen2.5-0.5B")
    assert parse_override("optim.betas=[0.9, 0.95]") == ("optim.betas", [0.9, 0.95])
    assert parse_override("log.trackers=['wandb']") == ("log.trackers", ["wandb"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lrr=1", ["command line", "'optim.lrr'", "'optim.lr'"]),
        ("optim.lr=inf", ["command line", "optim.lr", "finite"]),
        ("reward.timeout_s=inf", ["reward.timeout_s", "finite"]),
        ("task.source=", ["command line", "task.source"]),
        ("optm.lr=1", ["command line", "'optm'", "'optim'"]),
        ("lr=1", ["'lr'", "'optim.lr'"]),
        ("task.prompt.systm=x", ["'task.prompt.systm'", "'task.prompt.system'"]),
        ("objective.kl_coeff=1", ["kl_coeff", "'kl_coef'"]),
        ("objective.name=tepoo", ["'tepoo'", "'tepo'"]),
        ("train.steps=abc", ["train.steps", "integer", "'abc'"]),
        ("train.steps=0", ["train.steps", "greater than or equal to 1"]),
        ("optim.betas=[0.9, 2.0]", ["optim", "[0, 1)"]),
        ("no-sign", ["section.key=value"]),
        ("name.x=1", ["name"]),
    ],
)
def test_errors_name_key_and_nearest(override: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_config(None, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../up", "no path"),
        ("a/b", "no path"),
        ("a\\b", "no path"),
        ("..", "begin with"),
        (".hidden", "begin with"),
        ("-n", "begin with"),
        ("two\nlines", "newline"),
        ("bell\x07", "control"),
        (" ", "space"),
        ("end ", "space"),
        ("é" * 101, "200 bytes"),
    ],
)
def test_a_run_name_is_one_folder(name: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config({"name": name})
    assert words in str(caught.value)
    assert "name:" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["first run", "a-b_c.1", "gspo@2", "é" * 100, "日本", ""])
def test_other_run_names_are_taken_as_they_are(name: str) -> None:
    assert check_config({"name": name}).name == name


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")
    file = tmp_path / "bad.toml"
    file.write_text("[optim]\nlr = \n")
    with pytest.raises(InputError, match=r"bad.toml.*line 2"):
        load_config(file)
    file.write_text("[optim]\nlearning_rate = 1e-3\n")
    with pytest.raises(InputError, match=r"bad.toml: unknown key 'optim.learning_rate'"):
        load_config(file)


def test_every_error_is_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        check_config({"optim": {"lrr": 1}, "train": {"stepps": 2}})
    assert "optim.lrr" in str(caught.value)
    assert "train.stepps" in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"objective": {"name": "tepo", "kl_coef": 0.5}, "model": {"lora": {"rank": 4}}, "eval": {"temperature": 0.6}},
        {"task": {"mixture": [{"source": "arithmetic", "weight": 2.0}, {"source": "gym:chain_sum"}]}},
        {"reward": {"parts": [{"kind": "math"}, {"kind": "format", "pattern": '"a"\\b', "weight": 0.1}]}},
        {
            "sampling": {"stop": ["\n", "\x7f", "é\\"]},
            "task": {"prompt": {"few_shot": [{"question": "q", "answer": "a"}]}},
        },
    ],
)
def test_resolved_configuration_reads_back_equal(tree: dict[str, object]) -> None:
    config = check_config(tree)
    plain = plain_config(config)
    assert plain_config(check_config(tomllib.loads(dump_toml(plain)))) == plain


def test_objective_is_written_whole() -> None:
    plain = plain_config(load_config(None, ["objective.kl_coef=0.25"]))
    assert plain["objective"]["kl_coef"] == 0.25
    assert plain["objective"]["entropy_margin"] == 1e-3


def test_every_field_says_what_it_is_for() -> None:
    silent = [key for key, field in known_keys() if not field.description]
    assert silent == []


values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_toml_round_trip(tree: dict[str, object]) -> None:
    assert tomllib.loads(dump_toml(tree)) == tree
