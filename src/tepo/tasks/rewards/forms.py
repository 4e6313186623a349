"""Forms of answers that text alone decides, before or instead of a computer algebra system.

Such a system reads a word as a product of letters, drops units, takes a set for a tuple and a per cent for either of
two numbers. Here each form has a stated rule; what no rule decides is left to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tepo.tasks.rewards.extract import as_number

_POWER = re.compile(r"\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d))")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|\{\\,\})(?=\d{3}(?!\d))")
_BASE = re.compile(r"(?P<digits>[0-9A-Fa-f]{1,200})_\{?(?P<base>\d{1,2})\}?")
_DRESS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?P<number>[-+]?[\d.,\\!{}/ ]*\d)\s*(?:\\[,;:! ]|~)*\s*"
    r"(?P<unit>(?:[a-zA-Z]+\.?)(?:\s*(?:/|per)\s*[a-zA-Z]+)?(?:\s*\^\s*\{?[23]\}?)?)"
)
_BOUND = r"[^<>=,]{1,60}"
_LESS = r"(<=|<|\\leqslant|\\leq|\\le(?![a-z])|≤)"
_BETWEEN = re.compile(rf"({_BOUND}?)\s*{_LESS}\s*[a-zA-Z]\s*{_LESS}\s*({_BOUND})")
_ONE_SIDE = re.compile(
    rf"[a-zA-Z]\s*(<=|>=|<|>|\\leqslant|\\geqslant|\\leq|\\geq|\\le(?![a-z])|\\ge(?![a-z])|≤|≥)\s*({_BOUND})"
)
_CHOICE = re.compile(
    r"(?:answer|option|choice)\s*(?:is|:)?\s*(?:option\s*)?[*$\\({\[]*(?:text(?:bf)?\{)?\(?([A-J])\)?(?![A-Za-z])"
)

_UNITS: Mapping[str, tuple[str, ...]] = {
    "cm": ("cm", "centimeter", "centimetre"),
    "mm": ("mm", "millimeter", "millimetre"),
    "km": ("km", "kilometer", "kilometre"),
    "m": ("m", "meter", "metre"),
    "inch": ("in", "inch", "inche"),
    "foot": ("ft", "foot", "feet"),
    "yard": ("yd", "yard"),
    "mile": ("mi", "mile"),
    "second": ("s", "sec", "second"),
    "minute": ("min", "minute"),
    "hour": ("h", "hr", "hour"),
    "day": ("day",),
    "week": ("week",),
    "month": ("month",),
    "year": ("yr", "year"),
    "gram": ("g", "gram"),
    "kilogram": ("kg", "kilogram"),
    "pound": ("lb", "pound"),
    "ounce": ("oz", "ounce"),
    "liter": ("l", "liter", "litre"),
    "dollar": ("dollar",),
    "cent": ("cent",),
    "degree": ("degree",),
    "radian": ("rad", "radian"),
    "mph": ("mph",),
}
_KNOWN = {name: unit for unit, names in _UNITS.items() for name in names}


def tidy(text: str) -> str:
    """Return the text without what only dresses it: dollar signs, per cent signs, separators of thousands.

    A per cent sign is a unit and is dropped: 50 % is 50 and never 0.5.
    """
    bare = text.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    return _THOUSANDS.sub("", bare).replace("\\varnothing", "\\emptyset").strip()


def decide(reference: str, answer: str) -> bool | None:
    """Return whether the texts are the same answer where a rule of this module says so, else None."""
    for rule in (_numbers, _bases, _words, _brackets, _units):
        told = rule(reference, answer)
        if told is not None:
            return told
    return None


def as_interval(text: str) -> str:
    """Return an inequality in one letter as an interval: `1 < x \\le 5` as `(1, 5]`; any other text as it is."""
    bare = text.strip()
    if match := _BETWEEN.fullmatch(bare):
        low, first, second, high = match.groups()
        return f"{'(' if first == '<' else '['}{low.strip()}, {high.strip()}{')' if second == '<' else ']'}"
    if match := _ONE_SIDE.fullmatch(bare):
        sign, bound = match.groups()
        strict = sign in "<>"
        if sign[0] in "<≤" or sign.startswith("\\le"):
            return f"(-\\infty, {bound.strip()}{')' if strict else ']'}"
        return f"{'(' if strict else '['}{bound.strip()}, \\infty)"
    return text


def is_interval(text: str) -> bool:
    """Return whether a text looks like one interval."""
    bare = text.replace("\\left", "").replace("\\right", "").strip()
    return bool(re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\],]*[)\]]", bare))


def stated_choice(response: str) -> str | None:
    """Return the letter of the last `the answer is (B)` of a response; None without one."""
    found = _CHOICE.findall(response)
    return found[-1] if found else None


def is_choice(reference: str) -> str | None:
    """Return the letter where a reference is one of A to J, dressed or not."""
    match = re.fullmatch(r"\(?([A-J])\)?\.?", _undressed(reference))
    return match[1] if match else None


def _undressed(text: str) -> str:
    return _DRESS.sub(r"\1", text).replace("$", "").strip()


def _numbers(reference: str, answer: str) -> bool | None:
    """Two plain numbers are equal or not, exactly: 0.333 is not 1/3."""
    values = [as_number(_POWER.sub(lambda power: f"e{power[1] or power[2]}", text)) for text in (reference, answer)]
    return None if values[0] is None or values[1] is None else values[0] == values[1]


def _bases(reference: str, answer: str) -> bool | None:
    """Numbers that both name their base must agree in it."""
    found = [_BASE.fullmatch(text.replace(" ", "").strip("()")) for text in (reference, answer)]
    if found[0] is None or found[1] is None:
        return None
    return found[0]["base"] == found[1]["base"] and found[0]["digits"].lstrip("0") == found[1]["digits"].lstrip("0")


def _words(reference: str, answer: str) -> bool | None:
    """Words are compared as text: letters alone are no product where one side has four or more, or capitals."""
    sides = [_undressed(text).rstrip(".") for text in (reference, answer)]
    if not all(re.fullmatch(r"\(?[A-Za-z][A-Za-z' -]*\)?", side) for side in sides):
        return None
    bare = [re.sub(r"[()\s-]", "", side) for side in sides]
    if all(len(side) < 4 and (side.islower() or len(side) == 1) for side in bare) and bare[0].islower():
        return None
    return bare[0].casefold() == bare[1].casefold()


def _brackets(reference: str, answer: str) -> bool | None:
    """A set in braces is not a pair or interval in parentheses or brackets, whatever stands inside."""
    sides = [text.replace("\\left", "").replace("\\right", "").strip() for text in (reference, answer)]
    braces = [side.startswith("\\{") and side.endswith("\\}") for side in sides]
    round_ones = [side[:1] in "([" and side[-1:] in ")]" and "," in side for side in sides if side]
    return False if len(round_ones) == 2 and ((braces[0] and round_ones[1]) or (braces[1] and round_ones[0])) else None


def _units(reference: str, answer: str) -> bool | None:
    """The same number in two known units that differ is another answer; unknown or missing units do not count."""
    found = [_UNIT.fullmatch(_undressed(text)) for text in (reference, answer)]
    units = [_unit(match["unit"]) if match else None for match in found]
    return False if units[0] is not None and units[1] is not None and units[0] != units[1] else None


def _unit(text: str) -> str | None:
    """Return a known unit in one spelling, with its power; None for any other word."""
    name, _, power = text.replace("{", "").replace("}", "").partition("^")
    name = name.strip().rstrip(".")
    known = _KNOWN.get(name.lower()) or _KNOWN.get(name.lower().removesuffix("s"))
    return known and f"{known}{power.strip()}"
