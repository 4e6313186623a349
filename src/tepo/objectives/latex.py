"""Formulas in LaTeX, derived from the Unicode ones of the catalogue, so that each is written once.

The notation: Greek letters; subscripts (`ᵢ`, `_old`, `_{...}`) and superscripts (`²`, `^k`, `^(...)`); `a/b` takes one
factor on each side (a letter with its scripts, brackets, a sum with the factor behind it), `a / b` the whole product;
`1[...]` is an indicator; words are operators or text; two spaces after a comma begin the next equation.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

_SYMBOLS = {
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ε": r"\varepsilon", "η": r"\eta",
    "κ": r"\kappa", "λ": r"\lambda", "μ": r"\mu", "π": r"\pi", "ρ": r"\rho", "σ": r"\sigma", "τ": r"\tau",
    "φ": r"\varphi", "θ": r"\theta", "ω": r"\omega", "Δ": r"\Delta", "Ω": r"\Omega", "Φ": r"\Phi", "∞": r"\infty",
    "½": r"\tfrac{1}{2}", "⌊": r"\lfloor", "⌋": r"\rfloor", "⌈": r"\lceil", "⌉": r"\rceil",
}  # fmt: skip
_SIGNS = {
    "=": "=", "+": "+", "-": "-", ",": ",", "<": "<", ">": ">", ":": ":", "<=": r"\le", ">=": r"\ge", "≤": r"\le",
    "≥": r"\ge", "≠": r"\ne", "∈": r"\in", "←": r"\leftarrow", "→": r"\to",
}  # fmt: skip
_TIES = {"·": r"\cdot", "*": r"\cdot", "±": r"\pm", "‖": r"\,\Vert\,"}
_FUNCTIONS = {name: rf"\{name}" for name in ("min", "max", "log", "exp", "tanh")} | {
    name: rf"\operatorname{{{name}}}" for name in ("clip", "mean", "std", "sg", "softmax", "sgn", "whiten", "reduce")
}
_NAMES = {"KL": r"\mathrm{KL}", "RM": r"\mathrm{RM}", "E": r"\mathbb{E}", "Σ": r"\sum"}
_WORDS = _SYMBOLS | _FUNCTIONS | _NAMES
_ACCENTS = {"\u0303": r"\tilde", "\u0304": r"\bar", "\u0302": r"\hat"}
_BELOW = dict(zip("ᵢⱼₖₜₙₚ₊₋₀₁₂₃", "ijktnp+-0123", strict=True)) | {"≥": r"\ge ", "≤": r"\le "}
_ABOVE = dict(zip("⁰¹²³ᵖᵏ⁺⁻", "0123pk+-", strict=True)) | {"±": r"\pm "}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|"}
_TOKEN = re.compile(r"\d+(?:\.\d+)?|<=|>=|[A-Za-z]+|\s+|.", re.DOTALL)


@dataclass(frozen=True)
class _Factor:
    """A piece of LaTeX that scripts and fractions are bound to as one."""

    text: str
    kind: Literal["symbol", "number", "group", "function", "sum", "sign", "space"] = "symbol"

    def bare(self) -> str:
        """Return the text without round brackets around it, which a fraction's line replaces."""
        inner = self.text.removeprefix(r"\left(").removesuffix(r"\right)")
        return inner if self.kind == "group" and len(inner) == len(self.text) - 13 else self.text


def latex(formula: str) -> str:
    """Return a formula of the catalogue as LaTeX, for math mode."""
    text = _Reader(_TOKEN.findall(unicodedata.normalize("NFD", formula))).until("")
    return re.sub(r"( ?)\\text\{([^}]*)\}( ?)", r"\\text{\1\2\3}", text).replace(" ,", ",")


class _Reader:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = [*tokens, ""]
        self.place = 0

    def peek(self) -> str:
        """Return the next token; nothing at the end."""
        return self.tokens[self.place]

    def take(self) -> str:
        """Return the next token and pass it."""
        self.place += 1
        return self.tokens[self.place - 1]

    def until(self, closing: str) -> str:
        """Return what comes before a closing bracket, which is passed too, as LaTeX."""
        found: list[_Factor] = []
        while self.peek() not in ("", closing):
            if self.peek() == "/":
                self.take()
                found = self.fraction(found)
            elif self.peek() == "|" and not self.has_partner(closing):
                self.take()
                found.append(_Factor(r" \mid ", "sign"))
            else:
                found.append(self.factor())
        if closing:
            self.take()
        return _joined(found).strip()

    def has_partner(self, closing: str) -> bool:
        """Whether the bar that comes next is closed again within its brackets."""
        depth = 0
        for token in self.tokens[self.place + 1 :]:
            if depth == 0 and token in ("|", closing):
                return token == "|"
            depth += (token in tuple("([{")) - (token in tuple(")]}"))
        return False

    def fraction(self, before: list[_Factor]) -> list[_Factor]:
        """Return the factors so far, the last one (or, after a space, the last product) made a numerator."""
        if before and before[-1].kind == "space":
            start = max((place for place, item in enumerate(before) if item.kind == "sign"), default=-1) + 1
            over = _joined(before[start:]).strip()
            self.take()
            under = self.factor()
            return [*before[:start], _Factor(" "), _Factor(rf"\frac{{{over}}}{{{self.whole(under)}}}")]
        start = len(before) - 1
        if before[start].kind == "group" and start and before[start - 1].kind == "function":
            start -= 1  # a function's brackets belong to it
        over = before[start].bare() if start == len(before) - 1 else _joined(before[start:])
        under = self.factor()
        if under.kind == "number" and self.peek() in _SYMBOLS:
            under = _Factor(under.text + self.factor().text)
        return [*before[:start], _Factor(rf"\frac{{{over}}}{{{self.whole(under)}}}{self.scripts()}")]

    def whole(self, under: _Factor) -> str:
        """Return a denominator; a sum or a function takes the factor behind it along."""
        if under.kind != "sum" and not (under.kind == "function" and self.peek() in _CLOSING):
            return under.bare()
        if self.peek().isspace():
            self.take()
        return _joined([under, self.factor()])

    def factor(self) -> _Factor:
        """Return the next factor with its scripts."""
        token = self.take()
        if token.isspace():
            return _Factor(r" \quad " if len(token) > 1 else " ", "space")
        if token in _SIGNS or token in _TIES:
            return _Factor(f" {_SIGNS.get(token) or _TIES[token]} ", "sign" if token in _SIGNS else "symbol")
        if token in _CLOSING:
            left, right = (r"\{", r"\}") if token == "{" else (token, _CLOSING[token])
            return _Factor(rf"\left{left}{self.until(_CLOSING[token])}\right{right}{self.scripts()}", "group")
        article = token == "a" and self.peek().isspace() and self.tokens[self.place - 2].isspace()
        indicator = token == "1" and self.peek() == "["
        text = r"\text{a}" if article else r"\mathbf{1}" if indicator else _word(token)
        return _Factor(self.accented(text) + self.scripts(), _kind(token))

    def accented(self, text: str) -> str:
        """Return a symbol under the accent that follows it, if any."""
        return rf"{_ACCENTS[self.take()]}{{{text}}}" if self.peek() in _ACCENTS else text

    def scripts(self) -> str:
        """Return the subscripts and superscripts that come next."""
        below, above, primes = "", "", ""
        while True:
            token = self.peek()
            if token == "′":
                self.take()
                primes += "'"
            elif token in _BELOW and (token not in "≥≤" or (below and self.tokens[self.place + 1] in _BELOW)):
                below += _BELOW[self.take()]
            elif token in _ABOVE and token != "±":
                above += _ABOVE[self.take()]
            elif token == "_":
                self.take()
                below += self.script(r"\text{%s}")
            elif token == "^":
                self.take()
                above += self.script("%s")
            else:
                return primes + (f"_{{{below.strip()}}}" if below else "") + (f"^{{{above.strip()}}}" if above else "")

    def script(self, word: str) -> str:
        """Return a script written after `_` or `^`: a bracket's inside, a sign with a raised number, or a word."""
        token = self.take()
        if token in ("(", "{"):
            return self.until(_CLOSING[token])
        if token in _ABOVE:
            return _ABOVE[token] + "".join(_ABOVE[self.take()] for _ in range(self.peek() in _ABOVE))
        return word % token if len(token) > 1 else _SYMBOLS.get(token, token)


def _kind(token: str) -> Literal["symbol", "number", "function", "sum"]:
    """Return how a factor that begins with this token behaves in a fraction."""
    if token.isdigit():
        return "number"
    return "function" if token in _FUNCTIONS else "sum" if token == "Σ" else "symbol"


def _word(token: str) -> str:
    """Return a symbol, an operator, a number, a product of letters, or text."""
    if token in _WORDS:
        return _WORDS[token]
    product = len(token) == 2 and not token.islower()
    return token if len(token) == 1 or product or not token.isalpha() else rf"\text{{{token}}}"


def _joined(factors: list[_Factor]) -> str:
    """Return the factors as one text; a command is kept apart from the letter behind it."""
    text = ""
    for item in factors:
        apart = re.search(r"\\[A-Za-z]+$", text) and item.text[:1].isalpha()
        text += (" " if apart else "") + item.text
    return re.sub(r" +", " ", text)
