"""Reference of the service's settings, from the models of core and features."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dcp.server.core.settings import RootSettings, Settings
from dcp.server.features import features
from dcp.server.features.stages.stage_settings import StageRule, StagesSettings
from tools.reference.markdown import code, paragraphs, table

__all__ = ["settings"]

HEAD = """\
# Settings

Settings come from flags, then the environment, then the file `dcp-server.toml`; see [Run the
service](../../how-to/run-the-service.md#settings). The variable of a setting is `DCP_SERVER_` and its name
in capitals, with `__` between levels. Lists and tables in variables are JSON.
"""
NAMED: Final[dict[type[BaseModel], dict[str, BaseModel]]] = {
    StageRule: {"production": StagesSettings().rule("production")}
}
"""Entries of tables by name whose defaults differ from those of their model."""


def settings() -> str:
    """Return the page: settings of the service, of a root, and of each feature that has some."""
    parts = [
        HEAD,
        "## Service\n",
        _table(Settings, "DCP_SERVER_"),
        "## Roots\n",
        "Each root is a table `[roots.NAME]` of the file.\n",
        _table(RootSettings, "DCP_SERVER_ROOTS__NAME__"),
    ]
    for feature in sorted(features(), key=lambda one: one.name):
        if feature.settings is not None:
            parts.append(f"## {feature.name.replace('_', ' ').capitalize()}\n")
            parts += _tables(feature.settings, f"features.{feature.name}")
    return "\n".join(parts)


def _tables(model: type[BaseModel], place: str) -> Iterator[str]:
    about = paragraphs(model.__doc__ or "")
    yield f"`[{place}]`: {about}\n" if about else f"`[{place}]`\n"
    yield _table(model, f"DCP_SERVER_{place.replace('.', '__').upper()}__")
    for name, field in model.model_fields.items():
        for inner, is_named in _models(field.annotation):
            yield from _tables(inner, f"{place}.{name}{'.NAME' if is_named else ''}")


def _models(annotation: Any, is_named: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_named
    for one in get_args(annotation):
        yield from _models(one, is_named or get_origin(annotation) is dict)


def _table(model: type[BaseModel], prefix: str) -> str:
    rows = [
        (
            code(name),
            _type(field.annotation),
            "; ".join(filter(None, [_default(field), *_named_defaults(model, name)])),
            code(f"{prefix}{name.upper()}"),
            field.description or "",
        )
        for name, field in model.model_fields.items()
    ]
    return table(["setting", "type", "default", "variable", "description"], rows)


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return ", ".join(code(one) for one in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in inner if one is not type(None))
    if origin in (tuple, list, frozenset):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"table of {_type(inner[1])}"
    if isinstance(annotation, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return _type(annotation.__value__)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", SecretStr: "secret"}
    return (names | {Path: "path", ByteSize: "bytes"}).get(annotation, "any")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return _shown(value)


def _named_defaults(model: type[BaseModel], name: str) -> Iterator[str]:
    for entry, other in NAMED.get(model, {}).items():
        if getattr(other, name) != model.model_fields[name].default:
            yield f"{code(getattr(other, name))} for {code(entry)}"


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, dict) and all(isinstance(one, BaseModel) for one in value.values()):
        value = {name: one.model_dump(exclude_unset=True) for name, one in value.items()}
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (
        ""
        if value is None or value == {} or value == ()
        else code(list(value) if isinstance(value, tuple) else value)
    )
