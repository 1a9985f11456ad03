"""The OpenAPI document as a set of facts. Later versions must keep every fact; component names are no facts.

`python -m tests.support.openapi` writes this version's document to `PROMISED`, after an intended change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from dcp.server.app import create_app
from dcp.server.core.settings import Settings

__all__ = ["breaks", "document", "facts", "promised"]

PROMISED = Path(__file__).parents[1] / "service" / "openapi.json"
_PROSE = {"description", "summary", "title", "examples", "example"}
_ERROR = re.compile(r"/responses/[45]..$")
_REQUIRED = re.compile(r"(.*)/required\[\] = .*|(.*)/(?:parameters\[.*\]|requestBody)/required = true")
_COMPONENTS = "#/components/schemas/"


@cache
def document() -> dict[str, Any]:
    """Return the document of the service; opens no database."""
    return create_app(Settings(database_url=SecretStr("sqlite:///none.sqlite"))).openapi()


def promised() -> dict[str, Any]:
    """Return the recorded document, with which this version must be compatible."""
    found: dict[str, Any] = json.loads(PROMISED.read_text())
    return found


def facts(described: dict[str, Any]) -> set[str]:
    """Return all facts of a document except prose, the schemas of errors, and the names of components."""
    return set(_facts(described["paths"], "/paths", described["components"]["schemas"], ()))


def _facts(value: Any, path: str, schemas: dict[str, Any], within: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            name = item.get("name", "") if isinstance(item, dict) else ""
            yield from _facts(item, f"{path}[{name}]", schemas, within)
    elif isinstance(value, dict) and "$ref" in value:
        name = value["$ref"].removeprefix(_COMPONENTS)
        if name not in within:  # a recursive schema contains itself
            yield from _facts(schemas[name], path, schemas, (*within, name))
    elif isinstance(value, dict):
        is_prose = set() if path.endswith("/properties") else _PROSE
        kept = {} if _ERROR.search(path) else {name: value[name] for name in value.keys() - is_prose}
        for name, item in kept.items():
            yield from _facts(item, f"{path}/{name}", schemas, within)
        if not kept:
            yield path
    elif not str(value).startswith(_COMPONENTS):
        yield f"{path} = {json.dumps(value)}"


def breaks(before: dict[str, Any], described: dict[str, Any]) -> list[str]:
    """Return the missing facts, and new requirements for requests."""
    old, found = facts(before), facts(described)

    def is_new_duty(line: str) -> bool:
        match = _REQUIRED.fullmatch(line)
        place = f"{match[1] or match[2]}/" if match else ""
        is_request = "/requestBody/" in place or "/parameters[" in place
        return is_request and any(one.startswith(place) for one in old)

    new = [line for line in found - old if is_new_duty(line)]
    return sorted([*(f"gone: {line}" for line in old - found), *(f"required: {line}" for line in new)])


def _without_prose(value: Any, is_named: bool = False) -> Any:
    if isinstance(value, list):
        return [_without_prose(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = value if is_named else {name: value[name] for name in value.keys() - _PROSE}
    return {name: _without_prose(kept[name], name == "properties") for name in sorted(kept)}


if __name__ == "__main__":
    PROMISED.write_text(json.dumps(_without_prose(document()), separators=(",", ":")) + "\n")
