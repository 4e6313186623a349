"""Finding the answer in a text: last box, numbers, canonical forms. Linear time, nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

# A number as people write it: sign, digits with or without thousands commas, decimals, a power of ten, a divisor.
# Lengths are bounded, so that matching is linear and no text can ask for a number of a million digits.
NUMBER = re.compile(
    r"(?P<whole>(?<![\w.])[-+\N{MINUS SIGN}]?(?:\d{1,3}(?:,\d{3}){1,20}(?!\d)|\d{1,64}(?!\d))?(?:\.\d{1,64}(?!\d))?)"
    r"(?:[eE](?P<power>[-+]?\d{1,64})(?![\w]))?(?:\s?/\s?(?P<divisor>[1-9]\d{0,30})(?![\d.]))?"
)
MAX_POWER = 300
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Return the content of the \\boxed{} (or \\fbox{}) that opens last of those that close; None without one."""
    opened: list[tuple[bool, int]] = []  # one pass, so that a text full of open boxes takes no longer than another
    last: tuple[int, int] | None = None
    for token in BRACES.finditer(text):
        if token.group() == "}":
            boxed, start = opened.pop() if opened else (False, 0)
            if boxed and (last is None or start > last[0]):
                last = start, token.start()
        elif token.group().endswith("{") and token.group() != "\\{":
            opened.append((len(token.group()) > 1, token.end()))
    return text[last[0] : last[1]] if last else None


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
        if not any(character.isdigit() for character in whole) or abs(int(match["power"] or 0)) > MAX_POWER:
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
    # Spaces go, but for those between digits: 1 2 is not 12.
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", bare).casefold().rstrip(".")
