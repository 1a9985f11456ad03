"""The OpenAPI document changes by additions alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.openapi import PROMISED, breaks, document, facts


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """As it is now."""
    return document()


def test_all_that_was_promised_is_there(described: dict[str, Any]) -> None:
    """Paths, parameters, members, types, limits, statuses; and requests need nothing that they did not."""
    assert breaks(set(PROMISED.read_text().splitlines()), described) == []


def test_what_is_for_everybody_says_so(described: dict[str, Any]) -> None:
    """Also where a page, which needs a key, has the same path."""
    assert all("security" not in described["paths"][path]["get"] for path in ("/", "/healthz"))
    assert "security" in described["paths"]["/api/v1/whoami"]["get"]


def test_what_breaks_a_client_is_named(described: dict[str, Any]) -> None:
    """A removal, a change and a new duty each by its place; what is added breaks nothing."""
    promised, later = facts(described), copy.deepcopy(described)
    schemas, jobs = later["components"]["schemas"], later["paths"]["/api/v1/jobs"]
    schemas["JobAnswer"]["properties"]["owner"] = {"type": "string"}
    schemas["JobAnswer"]["required"].append("owner")
    schemas["NewKey"]["properties"]["note"] = {"type": "string"}
    jobs["get"]["parameters"].append({"name": "owner", "in": "query", "schema": {"type": "string"}})
    later["paths"]["/api/v1/news"] = {
        "post": {"parameters": [{"name": "a", "in": "query", "required": True}]}
    }
    assert breaks(promised, later) == []
    del schemas["JobAnswer"]["properties"]["attempt"]
    schemas["JobAnswer"]["properties"]["id"]["type"] = "string"
    schemas["NewKey"]["required"].append("note")
    jobs["get"]["parameters"][-1]["required"] = True
    del jobs["post"]["responses"]["202"]
    named = "\n".join(breaks(promised, later))
    for place in (
        "gone: /components/schemas/JobAnswer/properties/attempt/type",
        "gone: /components/schemas/JobAnswer/properties/id/type",
        "gone: /paths//api/v1/jobs/post/responses/202/",
        "required: /components/schemas/NewKey/required[]",
        "required: /paths//api/v1/jobs/get/parameters[owner]/required = true",
    ):
        assert place in named
