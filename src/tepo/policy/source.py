"""What `model.path` names: a built-in model, a folder, an adapter folder or a hub id; checked without loading it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tepo.core.errors import InputError, nearest

BUILTIN = ("builtin:smollm2-135m", "builtin:tiny")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Where a model comes from; for an adapter folder, `base` is the model it adapts."""

    kind: Literal["builtin", "folder", "adapter", "hub"]
    path: str
    base: str | None = None


def find_source(path: str) -> Source:
    """Return what `path` names; touches no network and loads nothing.

    Raises:
        InputError: an unknown built-in name, a missing folder, or a folder that holds no model.
    """
    if path.startswith("builtin:"):
        if path not in BUILTIN:
            raise InputError(f"model.path={path!r} is no built-in model.{nearest(path, BUILTIN)}")
        return Source("builtin", path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _check_folder(path, folder)
    if folder.exists():
        raise InputError(f"model.path={path!r} is a file; expected a folder saved by transformers, or a hub id")
    if _HUB_ID.fullmatch(path):
        return Source("hub", path)
    raise InputError(f"model.path={path!r}: there is no such folder.{similar_folders(folder)}")


def similar_folders(folder: Path) -> str:
    """Return " Did you mean '...'?" for a folder beside the missing one with nearly its name, else nothing."""
    parent = folder.parent
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    hint = nearest(folder.name, names) if names else ""
    if hint.startswith(" Did you mean"):
        close = hint.split("'")[1]
        return f" Did you mean {str(parent / close)!r}?"
    return "" if parent.is_dir() else f" Nor is there a folder {str(parent)!r}."


def _check_folder(path: str, folder: Path) -> Source:
    if (folder / "adapter_config.json").is_file():
        return _check_adapter(path, folder)
    if not (folder / "config.json").is_file():
        inside = [name for name in ("model", "final") if (folder / name / "config.json").is_file()]
        hint = f"; did you mean {str(Path(path) / inside[0])!r}?" if inside else ""
        raise InputError(f"model.path={path!r} has no config.json, so it is no model folder{hint}")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        gguf = " (GGUF files are not read; save the model with transformers first)"
        hint = gguf if next(folder.glob("*.gguf"), None) else ""
        raise InputError(
            f"model.path={path!r} has a config.json but no weights: expected model.safetensors,"
            f" model-00001-of-N.safetensors or pytorch_model.bin{hint}"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER):
        raise InputError(
            f"model.path={path!r} has weights but no tokenizer: copy tokenizer.json and tokenizer_config.json there"
        )
    return Source("folder", str(folder))


def _check_adapter(path: str, folder: Path) -> Source:
    if not any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise InputError(f"model.path={path!r} has an adapter_config.json but no adapter_model.safetensors")
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (json.JSONDecodeError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise InputError(f"{str(folder / 'adapter_config.json')!r} does not say which model it adapts")
    return Source("adapter", str(folder), base)
