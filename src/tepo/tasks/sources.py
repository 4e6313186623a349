"""Reading rows from files, folders and dataset hubs; every fault names the file, the line and what to do."""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError, MissingExtra

Row = Mapping[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def read_rows(source: str, *, split: str | None = None, subset: str | None = None) -> list[Row]:
    """Return the rows of a file, a folder or a hub dataset; raise InputError when there are none."""
    path = Path(source).expanduser()
    if path.is_dir():
        rows = _folder(path, split)
    elif path.is_file():
        rows = _file(path)
    elif path.suffix in READERS or not _is_hub_id(source):
        raise InputError(f"task.source: there is no file {source!r}.{_sibling(path)}")
    else:
        rows = _hub(source, split, subset)
    if not rows:
        raise InputError(f"{source}: the file is empty; it needs at least one problem")
    return rows


def _is_hub_id(source: str) -> bool:
    local = Path(source).parent
    return HUB_ID.fullmatch(source) is not None and not local.is_dir()


def _sibling(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {str(path.parent)!r} does not exist either."
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {str(path.with_name(close[0]))!r}?"
    data = [name for name in names if Path(name).suffix in READERS][:10]
    return f" The folder has: {', '.join(data)}." if data else " Its folder has no data files."


def _file(path: Path) -> list[Row]:
    if path.suffix not in READERS:
        raise InputError(f"{path}: unknown kind of file; expected one of {', '.join(sorted(READERS))}")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; it needs at least one problem")
    return READERS[path.suffix](path)


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 text ({error.reason})") from None


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Only \n ends a line: splitlines() would also cut at separators that JSON allows inside a string.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}, line {number}, column {error.colno}: broken JSON ({error.msg}): {line.strip()[:80]!r}"
            ) from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected an object {{...}}, found {line.strip()[:80]!r}")
        rows.append(row)
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}, column {error.colno}: broken JSON ({error.msg})") from None
    if isinstance(value, dict):  # {"data": [...]} and its kin
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise InputError(f"{path}: expected a list of objects, or an object with one such list")
    for number, row in enumerate(value):
        if not isinstance(row, dict):
            raise InputError(f"{path}: entry {number} is not an object but {str(row)[:80]!r}")
    return value


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), restkey="", strict=True)
    rows: list[Row] = []
    try:
        for row in reader:
            if None in row.values() or "" in row:
                found = sum(value is not None for value in row.values()) + len(row.get("") or ()) - ("" in row)
                raise InputError(
                    f"{path}, line {reader.line_num}: {found} fields, but the header names "
                    f"{len(reader.fieldnames or ())}"
                )
            rows.append(row)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: broken CSV ({error})") from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "data", "reading Parquet files") from None
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({error})") from None
    return rows


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _folder(path: Path, split: str | None) -> list[Row]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return _chosen(_datasets().load_from_disk(str(path)), str(path), split)
    files = sorted(
        file for file in path.rglob("*") if file.suffix in READERS and not file.name.startswith(".") and file.is_file()
    )
    if not files:
        raise InputError(f"{path}: the folder has no {', '.join(sorted(READERS))} files")
    names = {_split_of(file, path) for file in files}
    if split is None and "train" in names:
        split = "train"
    if split is not None:
        files = [file for file in files if _split_of(file, path) == split]
        if not files:
            raise InputError(f"{path}: no file of the split {split!r}; the files are of {', '.join(sorted(names))}")
    return [row for file in files for row in _file(file)]


def _split_of(file: Path, folder: Path) -> str:
    """Return the split a file belongs to by the hubs' habit: train-00000-of-00002.parquet, train/0.jsonl."""
    parent = file.parent.relative_to(folder).parts
    return parent[-1] if parent and parent[-1] != "data" else re.split(r"[-_.]", file.stem)[0]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "data", "reading Hugging Face datasets") from None
    return datasets


def _hub(name: str, split: str | None, subset: str | None) -> list[Row]:
    library = _datasets()
    try:
        loaded = library.load_dataset(name, subset)
    except Exception as error:  # the hub client raises many kinds; each means that the data cannot be had
        raise InputError(
            f"task.source: no local file {name!r}, and as a dataset of the hub it cannot be loaded: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from None
    return _chosen(loaded, name, split)


def _chosen(loaded: Any, name: str, split: str | None) -> list[Row]:
    if isinstance(loaded, dict):  # DatasetDict
        splits = sorted(loaded)
        wanted = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
        if wanted not in splits:
            raise InputError(f"{name}: task.split is {split!r}; the splits are {', '.join(splits)}")
        loaded = loaded[wanted]
    rows: list[Row] = loaded.to_list()
    return rows
