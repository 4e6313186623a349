"""Models saved to folders once a session, and loaded like a user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import build_model, save_model

from tepo.policy import Policy, PolicyConfig, load_policy


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of an architecture to the folder of its model."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_model(build_model(name), tmp_path_factory.mktemp("models") / name)
        return made[name]

    return folder


@pytest.fixture
def load(folder_of: Callable[[str], Path]) -> Callable[..., Policy]:
    """Return a function that loads an architecture as a policy with configuration fields."""

    def loaded(name: str, **fields: Any) -> Policy:
        say = fields.pop("say", lambda text: None)
        path = name if name.startswith("builtin:") else str(folder_of(name))
        return load_policy(PolicyConfig(path=path, device="cpu", **fields), say=say)

    return loaded
