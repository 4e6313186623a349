"""LaTeX derived from the Unicode formulas."""

from __future__ import annotations

import re

import pytest

import tepo
from tepo.objectives import Described, decoding_options
from tepo.objectives.latex import latex


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("Aᵢ = (Rᵢ - mean)/std", r"A_{i} = \frac{R_{i} - \operatorname{mean}}{\operatorname{std}}"),
        ("1/Σᵢ Lᵢ Σₜ rᵢₜ", r"\frac{1}{\sum_{i}L_{i}} \sum_{t} r_{it}"),
        ("R - Σⱼ LⱼRⱼ / Σⱼ Lⱼ", r"R - \frac{\sum_{j} L_{j}R_{j}}{\sum_{j}L_{j}}"),
        ("exp(1/Lᵢ Σₜ log π/π_old)", r"\exp\left(\frac{1}{L_{i}} \sum_{t} \log \frac{\pi}{\pi_{\text{old}}}\right)"),
        ("sg[sᵢ]·π/sg[π]", r"\operatorname{sg}\left[s_{i}\right] \cdot \frac{\pi}{\operatorname{sg}\left[\pi\right]}"),
        ("exp(-c²/2σ²)", r"\exp\left( - \frac{c^{2}}{2\sigma^{2}}\right)"),
        ("max(0, L)/K", r"\frac{\max\left(0, L\right)}{K}"),
        ("w̃ + H̄ᵢ + A′ᵢₜ", r"\tilde{w} + \bar{H}_{i} + A'_{it}"),
        ("E[R | p,v] - |x|/κ", r"\mathbb{E}\left[R \mid p, v\right] - \frac{\left|x\right|}{\kappa}"),
        ("e^(-λW)·W^k·(x)^(1/p)", r"e^{- \lambda W} \cdot W^{k} \cdot \left(x\right)^{\frac{1}{p}}"),
        ("1[A>0], B if C", r"\mathbf{1}\left[A > 0\right], B\text{ if }C"),
        ("Σₖ≥ₜ Hₖ^±¹,  Vₜ₊₁", r"\sum_{k\ge t} H_{k}^{\pm 1}, \quad V_{t+1}"),
    ],
)
def test_the_notation(formula: str, expected: str) -> None:
    assert re.sub(r" +", "", latex(formula)) == re.sub(r" +", "", expected)


@pytest.mark.parametrize("entry", [*tepo.objectives(), *decoding_options()], ids=lambda entry: entry.name)
def test_every_formula_has_one(entry: Described) -> None:
    text = entry.latex
    assert text.isascii(), [mark for mark in text if not mark.isascii()]
    assert text.count("{") == text.count("}")
    assert len(re.findall(r"\\left[^a]", text)) == len(re.findall(r"\\right[^a]", text))
    assert not re.search(r"/|\^(?!\{)|_(?!\{)", text)
