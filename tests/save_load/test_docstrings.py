"""Docstrings in editors: the public functions describe their arguments, results and errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import dcp

SMALL = "should_save request_stop cancel checkpoint_id all_steps latest delete pin unpin pinned wait close"
ERRORS_OF_PYTHON = ("TypeError", "ValueError", "ModuleNotFoundError")
CALLS = ("save", "async_save", "load", "read", "convert", "merge", "watch", "open_index", "CheckpointManager")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(dcp, name) for name in CALLS},
    **{f"manager.{name}": getattr(dcp.CheckpointManager, name) for name in ("save", "restore")},
    **{f"manager.{name}": getattr(dcp.CheckpointManager, name) for name in SMALL.split()},
}


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """Return the sections of a docstring by their headings."""
    parts = re.split(r"^(Args|Returns|Raises):\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_and_error_is_described(name: str) -> None:
    """Arguments are described in the order of the signature, and each named error exists."""
    function = FUNCTIONS[name]
    found = sections(function)
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]
    wanted = ["Args"] * bool(parameters) + ["Returns", "Raises"]
    if isinstance(function, type) or name.removeprefix("manager.") in SMALL.split():
        wanted = [each for each in wanted if each != "Returns" or each in found]
    assert list(found) == wanted
    described = re.findall(r"^    \**(\w+):", found.get("Args", ""), flags=re.MULTILINE)
    assert described == parameters
    for error in re.findall(r"^    (\w+):", found["Raises"], flags=re.MULTILINE):
        assert error in (*dcp.errors.__all__, *dcp.__all__, *ERRORS_OF_PYTHON), error
