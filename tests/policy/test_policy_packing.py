"""Where tokens lie in a pass without padding: small passes written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tepo.policy import TokenSequence, packing
from tepo.policy.packing import Packed, Piece, pack
from tepo.policy.sequences import recurring, scored_tokens, spread

CPU = torch.device("cpu")
ROWS = [
    TokenSequence((10, 11, 12), (20, 21, 22)),
    TokenSequence((13,), (23, 24)),
    TokenSequence((10, 11, 12), (25,)),
    TokenSequence((10, 11, 12), (26, 27, 28, 29), (True, False, True, True)),
]


@pytest.fixture
def separate() -> Packed:
    return pack(ROWS, share=False, device=CPU)


@pytest.fixture
def shared() -> Packed:
    return pack(ROWS, share=True, device=CPU)


def predictors(packed: Packed, rows: list[TokenSequence] = ROWS) -> list[int]:
    """Return the ids of the tokens that predict the scored ones."""
    return packed.ids[packed.predicting(scored_tokens(rows, width=None, device=CPU))].tolist()


def test_rows_lie_one_behind_the_other_longest_first(separate: Packed) -> None:
    """The last token of each response is not there."""
    assert separate.ids.tolist() == [10, 11, 12, 26, 27, 28, 10, 11, 12, 20, 21, 10, 11, 12, 13, 23]
    assert separate.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    (piece,) = separate.pieces
    assert piece.span == slice(0, 16)
    assert piece.prefixes is None
    assert piece.lengths.tolist() == [6, 5, 3, 2]
    expected = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 10], [11, 12, 13, 13, 13, 13], [14, 15, 15, 15, 15, 15]]
    assert piece.queries.tolist() == expected
    assert piece.keys.tolist() == expected
    assert piece.asked.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 18, 19]
    assert torch.equal(piece.own_keys, piece.asked)


def test_prompts_lie_first_and_rows_see_them_as_keys(shared: Packed) -> None:
    assert shared.ids.tolist() == [10, 11, 12, 13, 26, 27, 28, 20, 21, 23]
    assert shared.positions.tolist() == [0, 1, 2, 0, 3, 4, 5, 3, 4, 1]
    prompts, rows = shared.pieces
    assert (prompts.span, rows.span) == (slice(0, 4), slice(4, 10))
    assert prompts.queries.tolist() == prompts.keys.tolist() == [[0, 1, 2], [3, 3, 3]]
    assert prompts.lengths.tolist() == [3, 1]
    assert prompts.prefixes is None
    assert rows.queries.tolist() == [[4, 5, 6], [7, 8, 8], [9, 9, 9]]
    assert rows.keys.tolist() == [[0, 1, 2, 4, 5, 6], [0, 1, 2, 7, 8, 8], [3, 9, 9, 9, 9, 9]]
    assert rows.lengths.tolist() == [3, 2, 1]
    assert rows.prefixes is not None
    assert rows.prefixes.owners.tolist() == [0, 0, 1]
    assert rows.prefixes.lengths.tolist() == [3, 3, 1]
    assert rows.prefixes.width == 3
    assert rows.asked.tolist() == [0, 1, 2, 3, 4, 6]
    assert rows.own_keys.tolist() == [3, 4, 5, 9, 10, 13]


@pytest.mark.parametrize("share", [False, True])
def test_every_scored_token_is_predicted_by_the_one_before_it(share: bool) -> None:
    assert predictors(pack(ROWS, share=share, device=CPU)) == [12, 20, 21, 13, 23, 12, 12, 27, 28]


@pytest.mark.parametrize("share", [False, True])
def test_a_response_without_a_token_that_predicts_another_asks_for_its_prompt_alone(share: bool) -> None:
    rows = [TokenSequence((4, 5), ()), TokenSequence((4, 5), (6,)), TokenSequence((7,), (8,))]
    packed = pack(rows, share=share, device=CPU)
    assert packed.ids.tolist() == ([4, 5, 7] if share else [4, 5, 4, 5, 7])
    assert len(packed.pieces) == 1
    assert predictors(packed, rows) == [5, 7]


def visible(piece: Piece, window: int | None) -> list[list[str]]:
    """Return which keys the queries of each row see, a string of # and . for each."""
    mask = piece.mask(window)
    assert mask is not None
    assert mask.shape == (len(piece.lengths), 1, piece.queries.shape[1], piece.keys.shape[1])
    return [["".join(".#"[int(seen)] for seen in query) for query in row] for row in mask.squeeze(1).tolist()]


def test_a_query_sees_its_prefix_and_its_row_up_to_itself(shared: Packed) -> None:
    prompts, rows = shared.pieces
    assert prompts.mask(None) is None
    first, second, third = visible(rows, None)
    assert first == ["####..", "#####.", "######"]
    assert second[:2] == ["####..", "#####."]
    assert third[:1] == ["##...."]
    # What fills rows up sees something, so that it is a number.
    assert [second[2], *third[1:]] == ["######", "###...", "####.."]


def test_a_window_counts_over_prefix_and_row(shared: Packed) -> None:
    prompts, rows = shared.pieces
    assert visible(prompts, 2) == [["#..", "##.", ".##"]] * 2
    first, second, third = visible(rows, 2)
    assert first == ["..##..", "...##.", "....##"]
    assert second == ["..##..", "...##.", "....##"]
    assert third == ["##....", ".##...", "..##.."]
    assert visible(rows, 1)[0] == ["...#..", "....#.", ".....#"]
    assert visible(rows, 9) == visible(rows, None)
    assert rows.mask(2) is rows.mask(2)  # layers share what their backward passes keep


@pytest.mark.parametrize("window", [1, 2, 5, None])
def test_no_query_is_left_without_a_key(window: int | None) -> None:
    rows = [TokenSequence((3,) * before, (4,) * (own + 1)) for before, own in ((9, 1), (1, 7), (4, 4), (1, 1))]
    for piece in pack(rows, share=True, device=CPU).pieces:
        mask = piece.mask(window)
        assert mask is None or bool(mask.any(-1).all())


def test_a_piece_ends_where_lengths_fall_below_half_of_its_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [TokenSequence((1,), (2,) * length) for length in (3, 16, 7, 9, 2, 1)]

    def lengths(share: bool) -> list[list[int]]:
        return [piece.lengths.tolist() for piece in pack(rows, share=share, device=CPU).pieces]

    assert lengths(share=False) == [[16, 9, 7, 3, 2, 1]]  # too few tokens to be worth a piece of their own
    monkeypatch.setattr(packing, "PIECE_TOKENS", 16)
    assert lengths(share=False) == [[16, 9], [7, 3, 2, 1]]
    monkeypatch.setattr(packing, "PIECE_TOKENS", 1)
    assert lengths(share=False) == [[16, 9], [7], [3, 2], [1]]
    assert lengths(share=True) == [[1], [15, 8], [6], [2, 1]]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("piece_tokens", [1, 10, 256])
def test_pieces_cover_the_pass_in_order(monkeypatch: pytest.MonkeyPatch, share: bool, piece_tokens: int) -> None:
    monkeypatch.setattr(packing, "PIECE_TOKENS", piece_tokens)
    generator = torch.Generator().manual_seed(5)
    sizes: Tensor = torch.randint(1, 20, (12,), generator=generator)
    rows = [TokenSequence(tuple(range(5 + place % 3)), (7,) * size) for place, size in enumerate(sizes.tolist())]
    packed = pack(rows, share=share, device=CPU)
    end = 0
    for piece in packed.pieces:
        assert piece.span.start == end
        end = piece.span.stop
        assert piece.queries.flatten()[piece.asked].tolist() == list(range(piece.span.start, end))
        assert piece.keys.flatten()[piece.own_keys].tolist() == list(range(piece.span.start, end))
    assert end == len(packed.ids) == len(packed.positions)


def test_sizes_recur() -> None:
    """Few sizes between two powers of two, none much larger than what was asked for, small ones as they are."""
    found = [recurring(count) for count in range(1, 2049)]
    assert found[:63] == list(range(1, 64))
    assert found == sorted(found)
    assert all(count <= size <= count * 33 / 32 for count, size in enumerate(found, 1))
    assert all(recurring(size) == size for size in found)
    assert len({size for size in found if 1024 < size <= 2048}) == 32
    assert [recurring(count, 8) for count in (8, 15, 17, 31, 33, 64, 65)] == [8, 15, 18, 32, 36, 64, 72]


@pytest.mark.parametrize("share", [False, True])
def test_what_is_there_for_the_sizes_alone_is_no_ones(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    monkeypatch.setattr(packing, "PIECE_TOKENS", 10_000)
    rows = [TokenSequence((1, 2, 3 + row % 3), tuple(range(6, 10 + row % 20))) for row in range(35)]
    packed = pack(rows, share=share, device=CPU)
    assert packed.count == sum(len(row.response) - 1 + (0 if share else 3) for row in rows) + (9 if share else 0)
    assert len(packed.ids) == recurring(packed.count) > packed.count
    assert set(packed.ids[packed.count :].tolist()) == {int(packed.ids[packed.count - 1])}
    piece = packed.pieces[-1]
    assert len(piece.lengths) == len(piece.keys) == len(piece.queries) == recurring(35, 8) > 35
    assert piece.lengths[35:].tolist() == [0]
    assert piece.queries.flatten()[piece.asked].tolist() == list(range(piece.span.start, packed.count))
    assert piece.keys.flatten()[piece.own_keys].tolist() == list(range(piece.span.start, packed.count))
    assert piece.keys.shape[1] == recurring(25, 8) > 25

    scored = scored_tokens(rows, width=None, device=CPU)
    assert scored.count == sum(len(row.response) for row in rows) < len(scored.tokens) == recurring(scored.count)
    assert predictors(packed, rows)[: scored.count] == [
        token for row in rows for token in (row.prompt[-1], *row.response[:-1])
    ]
    table = spread(scored.tokens, scored)
    assert [table[row, : len(each.response)].tolist() for row, each in enumerate(rows)] == [
        list(each.response) for each in rows
    ]
