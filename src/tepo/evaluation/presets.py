"""Known benchmarks: which columns hold what, how they are graded, and what a model may have seen of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError, nearest


@dataclass(frozen=True)
class Preset:
    """One benchmark. `columns` and `answer_format` are fields of the task, `reward` of the reward section.

    `questions` is how many distinct questions the usual edition has, `samples` how many responses to each are usual;
    `pattern` recognises its files by name; `note` says since when a model may have seen it.
    """

    name: str
    title: str
    questions: int
    samples: int
    pattern: str
    note: str
    columns: Mapping[str, str] = field(default_factory=lambda: {"question": "problem", "answer": "answer"})
    answer_format: str = "plain"
    reward: Mapping[str, Any] = field(default_factory=lambda: {"kind": "math"})

    def task(self) -> dict[str, Any]:
        """Return the fields of the task section it sets."""
        return {"columns": dict(self.columns), "answer_format": self.answer_format}

    def fits(self, columns: Collection[str]) -> bool:
        """Return whether a file has the columns it maps."""
        return set(self.columns.values()) <= set(columns)


PRESETS = (
    Preset(
        "aime24",
        "AIME 2024",
        30,
        32,
        r"aime.?(20)?24",
        "public since February 2024, with solutions; models whose data is later have probably seen it. 30 questions "
        "are few: one sample each has a standard error of 8 points at an accuracy of 30 %",
    ),
    Preset(
        "aime25",
        "AIME 2025",
        30,
        32,
        r"aime.?(20)?25",
        "public since February 2025; several problems resemble older ones found on the web",
    ),
    Preset("amc23", "AMC 12, 2023", 40, 32, r"amc.?(20)?23", "public since November 2023, with solutions"),
    Preset(
        "math500",
        "MATH-500",
        500,
        4,
        r"math.?500",
        "500 questions of MATH's test split, public since 2021; widely used training sets hold other questions of "
        "that split, and some hold these",
    ),
    Preset(
        "minerva",
        "Minerva (OCWCourses)",
        272,
        4,
        r"minerva",
        "course exercises on the web long before 2022. Answers are graded exactly, where the paper allowed 1 % off",
        {"question": "problem", "answer": "solution"},
        "boxed",
    ),
    Preset(
        "olympiadbench",
        "OlympiadBench (English, text, open-ended mathematics)",
        675,
        4,
        r"olympiad.?bench",
        "public since February 2024, from older contests. Proof questions and pictures are left out",
        {"question": "question", "answer": "final_answer"},
    ),
    Preset(
        "omnimath",
        "Omni-MATH",
        4428,
        1,
        r"omni.?math",
        "public since October 2024, from older contests; many answers are beyond rule-based grading, as its authors "
        "say: read --grader-report",
    ),
    Preset(
        "gsm8k",
        "GSM8K",
        1319,
        1,
        r"gsm8?k",
        "public since 2021; fresh questions of its kind are answered up to 8 points worse by some models",
        {"question": "question", "answer": "answer"},
        "gsm8k",
    ),
    Preset("hmmt", "HMMT", 30, 32, r"hmmt", "public since the contest's day, February of its year, with solutions"),
)


def preset(name: str) -> Preset:
    """Return a preset by name; an unknown one is an `InputError` with the nearest."""
    found = {one.name: one for one in PRESETS}
    if name not in found:
        raise InputError(f"there is no benchmark {name!r}.{nearest(name, found)}")
    return found[name]


def recognised(source: str) -> Preset | None:
    """Return the preset whose files are named like `source`; None where none is."""
    name = Path(source).name.casefold()
    return next((one for one in PRESETS if re.search(one.pattern, name)), None)
