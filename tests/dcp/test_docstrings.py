"""What an editor shows of the functions that are called most: arguments, what comes back, what is raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import dcp

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "save": dcp.save,
    "async_save": dcp.async_save,
    "load": dcp.load,
    "read": dcp.read,
    "convert": dcp.convert,
    "CheckpointManager.save": dcp.CheckpointManager.save,
    "CheckpointManager.restore": dcp.CheckpointManager.restore,
}


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring by their headings."""
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    """In the order of the signature, and none that is not there."""
    function = FUNCTIONS[name]
    found = sections(function)
    assert list(found) == ["Args", "Returns", "Raises"]
    described = re.findall(r"^    \**(\w+):", found["Args"], flags=re.MULTILINE)
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]
    assert described == parameters


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_that_are_named_exist(name: str) -> None:
    """Each is a class of `dcp`, or of Python."""
    for error in re.findall(r"^    (\w+):", sections(FUNCTIONS[name])["Raises"], flags=re.MULTILINE):
        assert hasattr(dcp, error) or error in ("TypeError", "ValueError"), error
