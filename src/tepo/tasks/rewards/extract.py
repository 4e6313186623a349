"""Finding the answer in a text: last box, numbers, canonical forms. Linear time, nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

# A number as people write it: sign, digits with or without thousands commas, decimals, a power of ten, a divisor.
# Lengths are bounded, so that matching is linear and no text can ask for a number of a million digits.
NUMBER = re.compile(
    r"(?P<whole>(?<![\w.])[-+\N{MINUS SIGN}]?(?:\d{1,3}(?:,\d{3}){1,20}(?!\d)|\d{1,64}(?!\d))?(?:\.\d{1,64}(?!\d))?)"
    r"(?:[eE](?P<power>[-+]?\d{1,3})(?![\w]))?(?:\s?/\s?(?P<divisor>[1-9]\d{0,30})(?![\d.]))?"
)


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{} (or \\fbox{}), braces balanced; None without one."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def after(text: str, marker: str | None) -> str:
    """Return what follows the last `marker`: all of the text when `marker` is None, nothing when it is absent."""
    if marker is None:
        return text
    return text.rpartition(marker)[2] if marker in text else ""


def numbers(text: str) -> list[Fraction]:
    """Return every number of `text` in order."""
    found = []
    for match in NUMBER.finditer(text):
        whole = match["whole"].replace(",", "").replace("\N{MINUS SIGN}", "-")
        if not any(character.isdigit() for character in whole):
            continue
        value = Fraction(whole + (f"e{match['power']}" if match["power"] else ""))
        found.append(value / int(match["divisor"]) if match["divisor"] else value)
    return found


def as_number(text: str) -> Fraction | None:
    """Return the number that `text` is, spaces, `$` and a final point aside; None when it is not one number."""
    bare = text.strip().strip("$").strip().removesuffix(".")
    match = NUMBER.fullmatch(bare)
    found = numbers(bare) if match else []
    return found[0] if len(found) == 1 else None


def canonical_number(value: Fraction) -> str:
    """Return one spelling for a number: `17`, `1/3`."""
    return str(value)


def plain(text: str) -> str:
    """Return the text by which non-numeric answers are compared: without LaTeX dress, spaces, case, final point."""
    bare = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r"\1", text)
    bare = bare.replace("\\$", "").replace("$", "").replace("\\!", "").replace("\\,", " ").replace("~", " ")
    return "".join(bare.split()).casefold().rstrip(".")
