"""How often a 95 % interval covers the truth: `python benchmarks/interval_coverage.py [DOC]`, about two minutes.

Simulates benchmarks whose questions are drawn from a population with mean accuracy p. With one sample a question is
right with chance p; with eight, each question has its own chance, drawn from a Beta distribution of mean p and
a + b = 2 (many easy, many hard), and its samples are independent. With DOC, the table there is replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from tepo.core.seeds import address
from tepo.evaluation import estimates
from tepo.evaluation.statistics import wilson

SIMULATIONS = 2_000
QUESTIONS = (30, 100, 500)
ACCURACIES = (0.1, 0.3, 0.5, 0.8)
MARKS = ("<!-- coverage: begin -->", "<!-- coverage: end -->")


def simulate(questions: int, accuracy: float, samples: int, simulations: int) -> np.ndarray:
    """Return the share of right samples of every question of every simulated benchmark, [simulations, questions]."""
    generator = np.random.default_rng(address(0, "coverage", questions, round(1000 * accuracy), samples))
    shape = (simulations, questions)
    chance = np.full(shape, accuracy) if samples == 1 else generator.beta(2 * accuracy, 2 * (1 - accuracy), shape)
    return generator.binomial(samples, chance) / samples


def coverage(questions: int, accuracy: float, samples: int, simulations: int = SIMULATIONS) -> float:
    """Return how often the bootstrap's interval covers the accuracy."""
    rows = simulate(questions, accuracy, samples, simulations)
    return float(np.mean([one.low <= accuracy <= one.high for one in estimates(rows)]))


def wilson_coverage(questions: int, accuracy: float) -> float:
    """Return the same of the Wilson interval, which one sample a question allows."""
    rows = simulate(questions, accuracy, 1, SIMULATIONS)
    bounds = [wilson(float(mean), questions) for mean in rows.mean(axis=1)]
    return float(np.mean([low <= accuracy <= high for low, high in bounds]))


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| questions | accuracy | bootstrap, 1 sample | Wilson, 1 sample | bootstrap, 8 samples |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for questions in QUESTIONS:
        for accuracy in ACCURACIES:
            found = (
                coverage(questions, accuracy, 1),
                wilson_coverage(questions, accuracy),
                coverage(questions, accuracy, 8),
            )
            lines.append(f"| {questions} | {accuracy} | " + " | ".join(f"{100 * one:.1f} %" for one in found) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    text = table()
    print(text)
    if arguments:
        path = Path(arguments[0])
        between = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.DOTALL)
        replaced = between.sub(lambda _: f"{MARKS[0]}\n{text}\n{MARKS[1]}", path.read_text(encoding="utf-8"))
        path.write_text(replaced, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
