"""Stop texts are found across token borders and cut where the first of them begins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tepo.rollout.stopping import StopTexts

PIECES = ["", "ab", "c", "\n", "\n\n", "Ans", "wer", ":", " ", "é"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[index] for index in ids)


def completing_token(texts: tuple[str, ...], ids: list[int]) -> int | None:
    """Return the number of tokens after which the response is complete."""
    stops = StopTexts(texts, decode)
    return next((end for end in range(1, len(ids) + 1) if stops.completed(ids[:end])), None)


@pytest.mark.parametrize(
    ("texts", "ids", "expected"),
    [
        ((), [1, 2, 3], None),
        (("bc",), [1, 2, 3], 2),
        (("\n\n",), [1, 3, 2, 3, 3, 1], 5),
        (("\n\n",), [1, 4, 1], 2),
        (("Answer:", "zz"), [1] * 30 + [5, 6, 7, 8], 33),
        (("Answer:",), [5, 6, 8, 7], None),
        (("éc",), [9, 1, 9, 2], 4),
        (("c", "Answer:"), [1, 5, 6, 7, 2], 4),
    ],
)
def test_the_token_that_completes_a_stop_text(texts: tuple[str, ...], ids: list[int], expected: int | None) -> None:
    assert completing_token(texts, ids) == expected


def test_the_text_is_cut_before_the_first_stop_text() -> None:
    stops = StopTexts(("b", "cd"), decode)
    assert stops.cut("acdb") == "a"
    assert stops.cut("xyz") == "xyz"
    assert StopTexts((), decode).cut("abc") == "abc"


def test_a_long_response_is_not_decoded_whole_at_every_token() -> None:
    lengths = []

    def counting(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    stops = StopTexts(("Answer:",), counting)
    assert not stops.completed([1] * 1000)
    assert max(lengths) < 20
