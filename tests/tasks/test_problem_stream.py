from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.core.errors import WorkError
from tepo.tasks.mixture import BLOCK, MixtureStream, shares
from tepo.tasks.problem import Problem, distinct, normalised
from tepo.tasks.stream import ListPool, ShuffledStream, Slice, permuted


def problem(text: str) -> Problem:
    return Problem(text, ({"role": "user", "content": text},), text, "1")


def pool(count: int, name: str = "q") -> ListPool:
    return ListPool([problem(f"{name}{number}") for number in range(count)])


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), key=st.integers(0, 2**128 - 1))
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2**40, 2**300), key=st.integers(0, 2**128 - 1))
def test_permuted_stays_inside_a_range_too_large_to_list(size: int, key: int) -> None:
    images = {permuted(place, size, key) for place in range(50)}
    assert len(images) == 50
    assert all(0 <= image < size for image in images)


def test_permuted_places_every_item_everywhere() -> None:
    first = Counter(permuted(0, 10, key) for key in range(5000))
    assert min(first.values()) > 400
    assert max(first.values()) < 600


def test_permuted_outside_its_range_is_an_error() -> None:
    with pytest.raises(IndexError, match="outside range\\(3\\)"):
        permuted(3, 3, 0)


def test_every_epoch_visits_every_problem_once_in_an_order_of_its_own() -> None:
    stream = ShuffledStream(pool(37), seed=5)
    epochs = [[stream.problem(37 * epoch + place).id for place in range(37)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_draw_is_a_function_of_seed_and_number_alone() -> None:
    late = ShuffledStream(pool(37), seed=5).problem(1000)
    stream = ShuffledStream(pool(37), seed=5)
    assert [stream.problem(draw) for draw in range(1001)][-1] == late
    orders = {tuple(ShuffledStream(pool(37), seed).problem(draw).id for draw in range(8)) for seed in range(20)}
    assert len(orders) == 20


def test_a_slice_skips_places_and_leaves_the_rest() -> None:
    whole = [permuted(place, 20, 9) for place in range(20)]
    part = Slice(pool(20), key=9, start=5, size=13, skipped=(11, 7))
    names = [part.get(index).id for index in range(13)]
    assert names == [f"q{whole[place]}" for place in range(5, 20) if place not in {7, 11}]


def test_excluded_questions_are_drawn_again() -> None:
    banned = frozenset(f"q{number}" for number in range(0, 40, 2))
    stream = ShuffledStream(pool(40), seed=1, excluded=banned)
    drawn = {stream.problem(draw).id for draw in range(400)}
    assert not drawn & banned
    assert len(drawn) == 20


def test_a_stream_without_allowed_problems_says_so() -> None:
    stream = ShuffledStream(pool(3), seed=1, excluded=frozenset({"q0", "q1", "q2"}))
    with pytest.raises(WorkError, match="Lower held_out"):
        stream.problem(0)


def test_lists_are_filtered_at_once_and_counted() -> None:
    stream, dropped = ShuffledStream(pool(10), seed=1).where(lambda item: item.id in {"q3", "q4"})
    assert (stream.size, dropped) == (2, 8)
    assert {stream.problem(draw).id for draw in range(2)} == {"q3", "q4"}


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0], [0.001, 1000.0], [1 / 3, 1 / 3, 1 / 3], [5.0]])
def test_shares_fill_a_block_and_give_every_part_something(weights: list[float]) -> None:
    counts = shares(weights)
    assert sum(counts) == BLOCK
    assert min(counts) >= 1
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    assert all(abs(count - value) <= 1 for count, value in zip(counts, exact, strict=True))


def test_a_mixture_draws_by_weight_and_walks_each_part_in_its_own_order() -> None:
    parts = (ShuffledStream(pool(7, "a"), 1), ShuffledStream(pool(11, "b"), 2))
    mixture = MixtureStream(parts, shares([3, 1]), seed=4)
    places = [mixture.place(draw) for draw in range(3 * BLOCK)]
    assert Counter(part for part, _ in places) == {0: 2250, 1: 750}
    for part, count in ((0, 2250), (1, 750)):
        assert sorted(index for owner, index in places if owner == part) == list(range(count))
    part, index = places[1234]
    assert mixture.problem(1234) == parts[part].problem(index)
    early = Counter(part for part, _ in places[:100])
    assert 55 <= early[0] <= 95  # mixed within a block, not one part after the other


def test_questions_are_compared_without_case_width_and_spacing() -> None:
    assert normalised("What  is\n１ + 2?") == normalised("what is 1 + 2?")
    assert normalised("What is 1 + 2?") != normalised("What is 1 - 2?")
    kept = distinct([problem("A b"), problem("a  B"), problem("c")])
    assert [item.id for item in kept] == ["A b", "c"]
