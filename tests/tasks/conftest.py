from __future__ import annotations

from collections.abc import Callable

import pytest

from tepo.tasks.problem import Problem


@pytest.fixture
def problem() -> Callable[..., Problem]:
    def make(answer: str | None = "4", question: str = "2 + 2?", **metadata: object) -> Problem:
        return Problem("p", ({"role": "user", "content": question},), question, answer, metadata)

    return make
