"""docs/objectives.md and the README say what the catalogue says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ended import Tepo

import tepo
from tepo.cli.catalogue_page import page, shared_settings
from tepo.objectives import decoding_options
from tepo.objectives.composition import PARTS

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date(tepo_: Tepo) -> None:
    written = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    assert written == page(tepo.objectives(), decoding_options()), "docs/objectives.md is stale; type: make docs"
    assert tepo_("objectives", "--markdown").out == written


def test_the_readme_says_how_many_methods_there_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(r"There are (\d+) methods", readme)
    assert said is not None
    assert int(said[1]) == len(tepo.objectives()), "README.md, section Objectives: the number of methods has changed"


def test_the_page_has_every_method_setting_and_part() -> None:
    text = page(tepo.objectives(), decoding_options())
    shared = shared_settings(tepo.objectives())
    assert {"truncated", "log_ratio_clamp", "importance_weight"} <= {setting.name for setting in shared}
    for entry in tepo.objectives():
        section = text.split(f"\n## `{entry.name}`\n")[1].split("\n## ")[0]
        assert entry.formula in section
        assert not entry.paper.arxiv or entry.paper.arxiv in section
        assert [
            setting.name for setting in entry.settings if setting not in shared and setting.name not in section
        ] == []
    assert [kind for kinds in PARTS.values() for kind in kinds if f"| `{kind.__name__}` |" not in text] == []


def test_links_of_the_page_lead_to_its_sections() -> None:
    text = page(tepo.objectives(), decoding_options())
    # A heading's anchor: its text in lower case, spaces as hyphens, other marks dropped.
    headings = {
        re.sub(r"[^\w\- ]", "", line[3:]).replace(" ", "-").lower() for line in text.split("\n") if line[:3] == "## "
    }
    anchors = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(anchors) == len(tepo.objectives()) + len(decoding_options())
    assert set(anchors) <= headings


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_every_method_is_explained_alone_and_against_another(name: str, tepo_: Tepo) -> None:
    entry = next(entry for entry in tepo.objectives() if entry.name == name)
    shown = tepo_("explain", name).out
    assert entry.formula in shown
    assert all(f"  {setting.name} = " in shown for setting in entry.settings)
    latex = tepo_("explain", name, "--latex").out
    assert entry.latex in latex
    assert entry.formula not in latex
    other = "dapo" if name != "dapo" else "tepo"
    both = tepo_("explain", name, "--versus", other)
    differing = tepo_("explain", name, "--versus", other, "--json").json["differences"]["parts"]
    for part, (mine, theirs) in differing.items():
        assert mine != theirs
        assert f" {part} " in both.out


def test_a_decoding_option_is_listed_explained_and_has_no_loss(tepo_: Tepo) -> None:
    (option,) = decoding_options()
    listed = tepo_("objectives", "--json").json[-1]
    assert (listed["name"], listed["kind"], listed["section"]) == ("em-inf", "decoding option", "sampling.em_inf")
    assert listed["paper"]["arxiv"] == "2505.15134"
    row = next(line for line in tepo_("objectives").out.splitlines() if line.startswith(" em-inf "))
    assert all(word in row for word in ("2505.15134", "confirmed"))
    shown = tepo_("explain", "em-inf").out
    assert all(text in shown for text in (option.formula, "steps = 3", "no loss", "sampling.em_inf.steps=3"))
    assert option.latex in tepo_("explain", "em-inf", "--latex").out
    assert tepo_("explain", "em-inf", "--json").json == listed
    section = page(tepo.objectives(), decoding_options()).split("\n## `em-inf`\n")[1].split("\n## ")[0]
    assert all(f"`{setting.name}`" in section for setting in option.settings)
    for words in (("explain", "em-inf", "--versus", "dapo"), ("explain", "dapo", "--versus", "em-inf")):
        ended = tepo_(*words)
        assert ended.code == 2
        assert "option of decoding" in ended.err


def test_versus_lists_only_the_parts_that_differ(tepo_: Tepo) -> None:
    shown = tepo_("explain", "ppo", "--versus", "instructgpt").out
    table = shown.split("Parts that differ")[1].split("The same:")[0]
    assert "shaping" in table
    assert "KL in the reward of every token" in " ".join(table.split())
    assert not any(part in table for part in ("advantage ", "surrogate", "reducer", "regularizers"))
    assert "one objective" in tepo_("explain", "grpo", "--versus", "grpo").out


def test_what_is_not_confirmed_is_listed(tepo_: Tepo) -> None:
    shown = tepo_("explain", "tepo").out.split("Not confirmed")[1].split("Needs")[0]
    assert "kl_coef (inferred)" in shown
    assert "log_ratio_clamp" not in shown
