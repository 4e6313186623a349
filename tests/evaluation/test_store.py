from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_evaluate import Speaker, Telling, problems

from tepo.core.errors import InputError
from tepo.evaluation import Evaluation, Store, evaluate
from tepo.rollout import SamplingConfig
from tepo.tasks import Grader, Problem, RewardConfig

TEXTS = [["4", "5"], ["no", "7"], ["9", "9"], ["1", "x"], ["2", "2"]]


class Dying(Telling):
    """Answers until it was called `calls` times, then stops the process as a kill would."""

    def __init__(self, texts: Sequence[Sequence[str]], calls: int) -> None:
        super().__init__(texts)
        self.calls = calls
        self.drawn: list[int] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.drawn += list(named["draws"])
        return super().__call__(*arguments, **named)


def asked() -> list[Problem]:
    return problems("4", "7", "9", "1", "3")


def run(
    sampler: Telling, store: Store | None, *, seed: int = 1, progress: Callable[..., None] | None = None
) -> Evaluation:
    with Grader(RewardConfig(kind="numeric")) as grader:
        return evaluate(
            Speaker(),  # type: ignore[arg-type]
            asked(),
            grader,
            samples=2,
            sampling=SamplingConfig(rows=1),
            seed=seed,
            chat=False,
            sampler=sampler,
            store=store,
            progress=progress,
        )


def test_a_killed_evaluation_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    whole = run(Telling(TEXTS), None)
    store = Store(tmp_path / "r.partial")
    first = Dying(TEXTS, 1)
    with pytest.raises(KeyboardInterrupt):
        run(first, store)
    assert first.drawn == [0, 1]
    with store.path.open("ab") as file:
        file.write(b'{"place": 2, "resu')  # what a kill in the middle of a write leaves
    second = Dying(TEXTS, 9)
    assert run(second, store) == whole
    assert second.drawn == [2, 3, 4]
    third = Dying(TEXTS, 0)
    assert run(third, store) == whole
    store.remove()
    assert not store.path.exists()


def test_a_store_of_another_evaluation_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.partial")
    run(Telling(TEXTS), store)
    with pytest.raises(InputError, match=r"another evaluation \(seed differ\)"):
        run(Telling(TEXTS), store, seed=2)


def test_progress_counts_what_was_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.partial")
    with pytest.raises(KeyboardInterrupt):
        run(Dying(TEXTS, 1), store)
    seen: list[tuple[int, int]] = []

    class Reporting(Telling):
        def __call__(self, *arguments: Any, progress: Any = None, **named: Any) -> Any:
            progress(1, 4)
            return super().__call__(*arguments, **named)

    run(Reporting(TEXTS), store, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(5, 10), (9, 10)]
