"""The OpenAPI document as lines, one a fact, of which a later version keeps every one.

`python -m tests.support.openapi` writes those of this version to `PROMISED`, where a change of them is meant.
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

__all__ = ["PROMISED", "breaks", "document", "facts"]

PROMISED = Path(__file__).parents[1] / "service" / "openapi.txt"
_PROSE = {"description", "summary", "title", "examples", "example"}
_ERROR = re.compile(r"/responses/[45]..$")
_REQUIRED = re.compile(r"(.*)/required\[\] = .*|(.*)/(?:parameters\[.*\]|requestBody)/required = true")


@cache
def document() -> dict[str, Any]:
    """That of the service; nothing is opened."""
    return create_app(Settings(database_url=SecretStr("sqlite:///none.sqlite"))).openapi()


def facts(described: dict[str, Any]) -> set[str]:
    """All that it says but prose, and what each kind of error looks like."""
    return set(_facts({name: described.get(name, {}) for name in ("paths", "components")}, ""))


def _facts(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _facts(item, f"{path}[{item.get('name', '') if isinstance(item, dict) else ''}]")
    elif isinstance(value, dict):
        is_prose = set() if path.endswith("/properties") else _PROSE
        told = {} if _ERROR.search(path) else {name: value[name] for name in value.keys() - is_prose}
        for name, item in told.items():
            yield from _facts(item, f"{path}/{name}")
        if not told:
            yield path
    else:
        yield f"{path} = {json.dumps(value)}"


def breaks(promised: set[str], described: dict[str, Any]) -> list[str]:
    """What is not as it was promised: facts that are gone, and what a request has to have that it had not."""
    found = facts(described)
    asked = ("/paths/", *(f"/components/schemas/{name}/" for name in _requests(described)))

    def is_new_duty(line: str) -> bool:
        match = _REQUIRED.fullmatch(line)
        place = f"{match[1] or match[2]}/" if match else ""
        return place.startswith(asked) and any(old.startswith(place) for old in promised)

    new = [line for line in found - promised if is_new_duty(line)]
    return sorted([*(f"gone: {line}" for line in promised - found), *(f"required: {line}" for line in new)])


def _requests(described: dict[str, Any]) -> set[str]:
    """Names of the schemas that bodies of requests are made of."""
    schemas = described["components"]["schemas"]
    bodies = [way.get("requestBody", {}) for path in described["paths"].values() for way in path.values()]
    found: set[str] = set()
    left = _referred(bodies)
    while left:
        found |= left
        left = _referred([schemas[name] for name in left]) - found
    return found


def _referred(value: Any) -> set[str]:
    return set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(value)))


if __name__ == "__main__":
    PROMISED.write_text("".join(f"{line}\n" for line in sorted(facts(document()))))
