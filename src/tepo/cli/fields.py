"""Every field of the configuration, as text and as plain values, read from the models that check it."""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
_WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true | false",
    "NoneType": "unset",
    "Any": "any value",
}


def describe_fields() -> list[dict[str, Any]]:
    """Return one record a field: key, section, type, default (None: unset), required, and what it is for."""
    from tepo.training.config import RunConfig

    return [
        {
            "key": f"{section}.{name}" if section else name,
            "type": type_text(field.annotation, field.metadata),
            "default": _default(field),
            "required": field.is_required(),
            "description": " ".join((field.description or "").split()),
        }
        for section, model in sections(RunConfig)
        for name, field in leaves(model)
    ]


def fields_text(width: int = 100) -> str:
    """Return the whole configuration as text: sections, and under each field what it is for."""
    from tepo.training.config import RunConfig

    lines = ["Configuration: keys of RUN.TOML, and section.key=value on the command line"]
    for section, model in sections(RunConfig):
        lines += ["", *_wrapped(f"[{section}]" if section else "(top level)", _summary(model), width)]
        for name, field in leaves(model):
            head = f"  {name}: {type_text(field.annotation, field.metadata)}{_default_text(field)}"
            lines += textwrap.wrap(head, width, subsequent_indent=" " * 6)
            description = " ".join((field.description or "").split())
            lines += textwrap.wrap(description, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (dotted name, model) of the configuration itself and of every section under it."""
    yield prefix, model
    for name, field in model.model_fields.items():
        inner = section_model(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{prefix}.{name}" if prefix else name)


def leaves(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a model that are values, not sections."""
    for name, field in model.model_fields.items():
        if section_model(field.annotation) is None:
            yield name, field


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a section of its own (M or M | None), not a list of them."""
    from pydantic import BaseModel

    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def type_text(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    """Return a type in a reader's words: `number > 0`, `"min" | "max"`, `list of text`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin is typing.Literal:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in arguments)
    if _is_union(annotation):
        return " | ".join(type_text(option, metadata if option is not type(None) else ()) for option in arguments)
    if origin is not None:
        return _container_text(origin, arguments)
    name = getattr(annotation, "__name__", str(annotation))
    bounds = [f"{sign} {getattr(item, key)}" for item in metadata for key, sign in _BOUNDS if hasattr(item, key)]
    return " ".join([_WORDS.get(name, "table" if name[:1].isupper() else name), *bounds])


def _container_text(origin: Any, arguments: tuple[Any, ...]) -> str:
    """Return the words for a list, a fixed row of values, or a table."""
    items = [item for item in arguments if item is not Ellipsis]
    if origin is tuple and Ellipsis not in arguments:
        return "[" + ", ".join(type_text(item) for item in items) + "]"
    if origin in (tuple, list) or getattr(origin, "__name__", "") == "Sequence":
        return "list of " + (type_text(items[0]) if items else "values")
    return "table" + (f" of {type_text(items[-1])}" if items else "")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _default(field: FieldInfo) -> Any:
    """Return the default as a plain value; None where there is none."""
    from pydantic_core import to_jsonable_python

    if field.is_required():
        return None
    return to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}), fallback=str)


def _default_text(field: FieldInfo) -> str:
    """Return ` = value` as it would be written in TOML, or a word where nothing would be."""
    import json

    if field.is_required():
        return " (required)"
    value = _default(field)
    return " (unset)" if value is None else f" = {json.dumps(value, ensure_ascii=False)}"


def _summary(model: type[BaseModel]) -> str:
    """Return the first paragraph of a model's docstring."""
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _wrapped(head: str, text: str, width: int) -> list[str]:
    """Return a heading followed by text, wrapped under itself."""
    return textwrap.wrap(f"{head} {text}", width, subsequent_indent="  ")
