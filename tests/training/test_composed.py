"""Objectives composed in a run's configuration: read, written out whole, trained and gone on with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tepo.core.errors import InputError
from tepo.objectives import KL, EntropyBonus, FallingEntropy, SequenceTokenRatio, objective
from tepo.testing import check_objective
from tepo.training.config import ObjectiveConfig
from tepo.training.loading import check_config, load_config
from tepo.training.rundir import RunFolder, plain_config, read_config
from tepo.training.toml import dump_toml
from tepo.training.trainer import train

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "composed.toml"


def test_the_example_is_what_it_says_and_passes_the_matrix() -> None:
    built = load_config(EXAMPLE).objective.build()
    assert built.name == "held-back"
    assert built.ratio == SequenceTokenRatio()
    assert built.regularizers == (
        KL(0.1, estimator="k2", mask=FallingEntropy(margin=0.01)),
        EntropyBonus(0.001),
    )
    assert built.reducer == objective("dapo").reducer
    assert built.surrogate == objective("dapo", clip_high=0.3).surrogate
    check_objective(built)


def test_the_example_trains_three_steps_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    quick = ["eval.at_start=false", "eval.at_end=false", "train.preflight=0", "model.threads=1", f"runs={tmp_path}"]
    config = load_config(EXAMPLE, quick)
    result = train(config)
    assert result.steps == 3
    saved, _ = read_config(RunFolder(result.folder))
    assert saved.objective.build() == config.objective.build()
    assert train(load_config(EXAMPLE, [*quick, "train.steps=4"]), resume=result.folder).steps == 4


def test_a_composition_is_written_whole_and_read_back() -> None:
    config = check_config(
        {
            "objective": {
                "base": "ppo",
                "clip_low": 0.1,
                "advantage": {"part": "GAE", "lam": 1.0},
                "regularizers": [{"part": "ValueLoss", "clip": "none"}],
                "selectors": [],
            }
        }
    )
    written = tomllib.loads(dump_toml(plain_config(config)))
    assert written["objective"]["name"] == "ppo-composed"
    assert written["objective"]["advantage"] == {"part": "GAE", "gamma": 1.0, "lam": 1.0}
    assert written["objective"]["regularizers"][0]["clip"] == "none"
    again = check_config(written)
    assert again.objective.build() == config.objective.build()
    assert plain_config(again) == plain_config(config)


def test_a_setting_can_be_unset() -> None:
    config = ObjectiveConfig.model_validate({"name": "steer", "clip_dual": "none"})
    assert config.build() == objective("steer", clip_dual=None)
    assert config.resolved()["clip_dual"] == "none"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"base": "dap"}, "Did you mean 'dapo'"),
        ({"base": "dapo", "ratio": {"part": "SequenceRato"}}, "ratio: no part 'SequenceRato'. Did you mean"),
        ({"name": "dapo", "ratio": {"part": "SequenceRatio"}}, 'parts go with base = "dapo"'),
        ({"name": "dapo", "regularizers": []}, 'parts go with base = "dapo"'),
    ],
)
def test_what_does_not_fit_is_named(section: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config({"objective": section})
    assert said in str(caught.value)
