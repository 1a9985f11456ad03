"""The OpenAPI document changes by additions alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.openapi import PROMISED, breaks, document


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
