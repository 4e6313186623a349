"""`tepo doctor`: what this machine can do, what is missing, and what to type."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "rich", "typer", "numpy", "math-verify")
"""Distributions `tepo` cannot run without."""

EXTRAS = {
    "cpu": (("numba",), "compiled steps of sampling on a processor"),
    "gguf": (("gguf", "accelerate"), "the built-in model builtin:smollm2-135m"),
    "gym": (("reasoning_gym",), "procedurally generated problems"),
    "data": (("datasets", "pyarrow"), "Parquet files and Hugging Face datasets"),
    "lora": (("peft",), "low-rank adapters"),
    "track": (("tensorboard",), "metrics to TensorBoard"),
}
"""Extra -> (modules it brings, what they are for)."""


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Load this model and say which fast paths it takes, and why not."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do, which fast paths are active, what is missing, and what to type."""
    from tepo.cli.process import prepare

    prepare()
    facts = examine(model)
    from tepo.cli.terminal import print_json

    if as_json:
        print_json(facts)
    else:
        _show(facts)


def examine(model: str | None = None) -> dict[str, Any]:
    """Return everything `tepo doctor` reports, as plain values; fast paths for one `model` where it is given."""
    from tepo.cli.fast_paths import fast_paths

    facts: dict[str, Any] = {
        "tepo": _version("tepo") or "not installed",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in CORE},
        "extras": {name: _extra(name) for name in EXTRAS},
        "device": _device(),
        "memory": _memory(),
        "builtin_model": _builtin_model(),
        "fast_paths": fast_paths(model),
    }
    facts["advice"] = _advice(facts)
    return facts


def _version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(name: str) -> dict[str, Any]:
    """Return whether an extra's modules are there, and what to type where they are not."""
    modules, purpose = EXTRAS[name]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return {"present": not missing, "for": purpose, "install": f"pip install 'tepo[{name}]'" if missing else None}


def _device() -> dict[str, Any]:
    """Return what computes, with how many threads, and in which precision."""
    import torch

    from tepo.core import allocator
    from tepo.policy.device import choose_device, has_native_bfloat16

    device = choose_device("auto")
    return {
        "chosen": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16": has_native_bfloat16(device),
        "allocator_keeps_memory": allocator.is_on(),
    }


def _processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, Any]:
    """Return free memory and disk, in GiB (None where the system does not say)."""
    import torch

    facts: dict[str, Any] = {"free_gib": _free_memory(), "disk_free_gib": _gib(shutil.disk_usage(Path.cwd()).free)}
    if torch.cuda.is_available():
        facts["device_free_gib"] = _gib(torch.cuda.mem_get_info()[0])
    return facts


def _free_memory() -> float | None:
    """Return the memory a new process could take, in GiB."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return _gib(int(line.split()[1]) * 1024)
    return None


def _gib(count: int) -> float:
    """Return bytes in GiB, to a tenth."""
    return round(count / 2**30, 1)


def _builtin_model() -> dict[str, Any]:
    """Return where the built-in model is kept and whether it is there already."""
    from tepo.policy.smollm2 import smollm2_folder

    folder = smollm2_folder()
    return {"folder": str(folder), "present": folder.exists()}


def _advice(facts: dict[str, Any]) -> list[str]:
    """Return what to type next, most important first."""
    lines = [f"{name} is missing: pip install {name}" for name, version in facts["versions"].items() if not version]
    gguf = facts["extras"]["gguf"]
    if not gguf["present"]:
        lines.append(f"for {gguf['for']}: {gguf['install']}")
    free = facts["memory"]["free_gib"]
    if free is not None and free < 6:
        lines.append(f"{free} GiB of memory are free; training the built-in model in full takes about 6")
    disk = facts["memory"]["disk_free_gib"]
    if disk < 3:
        lines.append(f"{disk} GiB of disk are free; a run of the built-in model takes about 3")
    if not facts["builtin_model"]["present"]:
        lines.append("the built-in model is fetched at first use (93 MB, from the package index)")
    return lines


def _show(facts: dict[str, Any]) -> None:
    """Print the report as tables."""
    from tepo.cli.terminal import console, print_table

    device, memory, model = facts["device"], facts["memory"], facts["builtin_model"]
    software = [
        ("tepo", facts["tepo"]),
        ("python", f"{facts['python']} ({sys.executable})"),
        ("system", facts["system"]),
        *((name, version or "missing") for name, version in facts["versions"].items()),
    ]
    print_table("Software", ("what", "here"), software)
    machine = [
        ("device", f"{device['chosen']}: {device['name']}"),
        ("cores, threads", f"{device['cores']}, {device['threads']}"),
        ("bfloat16", "native" if device["bfloat16"] else "not native; float32 is used"),
        ("freed memory kept", "yes" if device["allocator_keeps_memory"] else "no"),
        ("free memory", "unknown" if memory["free_gib"] is None else f"{memory['free_gib']} GiB"),
        ("free disk here", f"{memory['disk_free_gib']} GiB"),
        ("built-in model", f"{'in' if model['present'] else 'will be in'} {model['folder']}"),
    ]
    print_table("Machine", ("what", "here"), machine)
    spoken = {True: "yes", False: "no", None: "by model"}
    paths = [(path["name"], spoken[path["active"]], path["detail"], path["option"]) for path in facts["fast_paths"]]
    print_table("Fast paths", ("path", "active", "where", "to switch it off"), paths)
    extras = [
        (name, "yes" if extra["present"] else "no", extra["for"], extra["install"] or "")
        for name, extra in facts["extras"].items()
    ]
    print_table("Extras", ("extra", "present", "for", "to install"), extras)
    out = console()
    for line in facts["advice"] or ["nothing is missing; try: tepo train examples/quickstart.toml"]:
        out.print(f"- {line}", soft_wrap=True)
