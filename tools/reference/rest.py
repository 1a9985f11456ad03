"""Reference of the REST API, from the OpenAPI document: operations by topic, and the models of their JSON."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from pydantic import SecretStr

from dcp.server.app import create_app
from dcp.server.core.settings import Settings
from dcp.server.features import kinds
from tools.reference.markdown import cell, code, paragraphs, table

__all__ = ["rest", "rest_models"]

API: Final = "/api/v1"
Document = dict[str, Any]

HEAD = f"""\
# REST API

Paths are relative to `{API}` unless they begin with another folder. The
[conventions](../rest-conventions.md) describe authentication, errors, pagination and idempotency, which
hold for every operation. Bodies and answers are JSON; their fields are in [models](rest-models.md). Each
service has this page as `/docs`, and the document itself as `/openapi.json`.
"""
KINDS: Final = """\
`POST /jobs` takes a `kind` with its `params`. A key needs the scope of the kind.
"""
MODELS_HEAD = """\
# REST models

Fields of the bodies and answers of the [REST API](rest.md).
"""


@cache
def _document() -> Document:
    document: Document = create_app(Settings(database_url=SecretStr("sqlite:///none.sqlite"))).openapi()
    return document


def rest() -> str:
    """Return the page of operations."""
    topics: dict[str, list[str]] = {}
    contents: dict[str, list[tuple[str, str, str]]] = {}
    for path, methods in _document()["paths"].items():
        for method, operation in methods.items():
            topic = (operation.get("tags") or ["service"])[0].replace("_", " ").capitalize()
            topics.setdefault(topic, []).append(_operation(method.upper(), path, operation))
            contents.setdefault(topic, []).append(_content(method.upper(), path, operation))
    parts = [HEAD, "## Kinds of jobs\n", KINDS, _kinds()]
    for topic in sorted(topics):
        parts += [f"## {topic}\n", table(["operation", "scope", ""], contents[topic]), *topics[topic]]
    return "\n".join(parts)


def rest_models() -> str:
    """Return the page of models."""
    schemas: Document = _document()["components"]["schemas"]
    return "\n".join([MODELS_HEAD, *(_model(name, schemas[name]) for name in sorted(schemas))])


def _kinds() -> str:
    schemas = _document()["components"]["schemas"]
    rows = []
    for name, kind in kinds().items():
        params = schemas[f"New{name.capitalize()}Job"]["properties"]["params"]
        rows.append((code(name), code(kind.scope), _type(params), kind.about))
    return table(["kind", "scope", "params", ""], rows)


def _scope(operation: Document) -> str:
    scope = operation.get("x-required-scope", "any" if operation.get("security") else "none")
    return code(scope)


def _brief(operation: Document) -> str:
    return (
        paragraphs(operation.get("description") or operation["summary"])
        .partition("\n\n")[0]
        .partition(". ")[0]
        .rstrip(".")
    )


def _content(method: str, path: str, operation: Document) -> tuple[str, str, str]:
    name = f"{method} {path.removeprefix(API) or '/'}"
    return f"[{code(name)}](#{operation['operationId']})", _scope(operation), _brief(operation)


def _operation(method: str, path: str, operation: Document) -> str:
    name = f"{method} {path.removeprefix(API) or '/'}"
    parts = [
        f'### `{name}` {{ #{operation["operationId"]} data-toc-label="{_label(operation)}" }}\n',
        f"{paragraphs(operation.get('description') or operation['summary'])}\n",
        f"Scope: {_scope(operation)}.\n",
    ]
    if parameters := operation.get("parameters"):
        parts.append(
            table(["parameter", "in", "type", "default", "description"], map(_parameter, parameters))
        )
    if body := operation.get("requestBody"):
        parts.append(f"Body: {_content_types(body['content'])}.\n")
    answers = [
        f"{status} {_content_types(answer.get('content') or {})}".strip()
        for status, answer in operation["responses"].items()
        if status < "400"
    ]
    parts.append(f"Answers: {'; '.join(answers)}.\n")
    return "\n".join(parts)


def _label(operation: Document) -> str:
    return str(operation["operationId"]).replace("_", " ").capitalize()


def _parameter(parameter: Document) -> tuple[str, str, str, str, str]:
    schema = parameter["schema"]
    default = "required" if parameter.get("required") else _default(schema)
    about = parameter.get("description") or schema.get("description") or ""
    return code(parameter["name"]), parameter["in"], _type(schema), default, paragraphs(about)


def _content_types(content: Document) -> str:
    found = []
    for name, one in content.items():
        schema = _type(one["schema"]) if one.get("schema") else ""
        found.append(schema if name == "application/json" and schema else f"{code(name)}")
    return ", ".join(dict.fromkeys(found))


def _default(schema: Document) -> str:
    value = schema.get("default")
    return "" if value is None or value == [] or value == {} else code(value)


def _type(schema: Document) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](rest-models.md#{name.lower()})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in choices))
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return ", ".join(code(one) for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return f"{kind}{_limits(schema)}"


def _limits(schema: Document) -> str:
    if schema.get("format") == "date-time":
        return " (time)"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    high = None if high is not None and abs(high) >= 2**53 - 1 else high
    low = None if low is not None and abs(low) >= 2**53 - 1 else low
    if low is not None and high is not None:
        return f" ({low} to {high})"
    return f" (at least {low})" if low is not None else f" (at most {high})" if high is not None else ""


def _model(name: str, schema: Document) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (
            code(field),
            _type(one),
            "required" if field in required else _default(one),
            paragraphs(one.get("description") or ""),
        )
        for field, one in schema.get("properties", {}).items()
    ]
    about = paragraphs(schema.get("description") or "")
    body = table(["field", "type", "default", "description"], rows) or f"{cell(_type(schema))}\n"
    return "\n".join([f"## {name} {{ #{name.lower()} }}\n", *([f"{about}\n"] if about else []), body])
