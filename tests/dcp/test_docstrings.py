"""What an editor shows of the functions that are called most: arguments, what comes back, what is raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import dcp
import dcp.inspection.checkpoints
import dcp.inspection.runs
import dcp.inspection.values.difference
import dcp.inspection.values.statistics
import dcp.inspection.values.tensor_reading
import dcp.inspection.verification

SMALL = (
    "should_save",
    "request_stop",
    "cancel",
    "checkpoint_id",
    "all_steps",
    "latest",
    "delete",
    "pin",
    "unpin",
    "pinned",
    "wait",
    "close",
)
ERRORS_OF_PYTHON = ("TypeError", "ValueError", "ModuleNotFoundError")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "save": dcp.save,
    "async_save": dcp.async_save,
    "load": dcp.load,
    "read": dcp.read,
    "convert": dcp.convert,
    "merge": dcp.merge,
    "watch": dcp.watch,
    "statistics": dcp.inspection.values.statistics.statistics,
    "diff": dcp.inspection.values.difference.diff,
    "verify": dcp.inspection.verification.verify,
    "open_tensors": dcp.inspection.values.tensor_reading.open_tensors,
    "open_index": dcp.open_index,
    "list_checkpoints": dcp.inspection.checkpoints.list_checkpoints,
    "list_runs": dcp.inspection.runs.list_runs,
    "list_below": dcp.inspection.runs.list_below,
    "CheckpointManager": dcp.CheckpointManager,
    "CheckpointManager.save": dcp.CheckpointManager.save,
    "CheckpointManager.restore": dcp.CheckpointManager.restore,
    **{f"CheckpointManager.{name}": getattr(dcp.CheckpointManager, name) for name in SMALL},
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
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]
    wanted = ["Args"] * bool(parameters) + ["Returns", "Raises"]
    if isinstance(function, type) or name.removeprefix("CheckpointManager.") in SMALL:
        wanted = [each for each in wanted if each != "Returns" or each in found]
    assert list(found) == wanted
    described = re.findall(r"^    \**(\w+):", found.get("Args", ""), flags=re.MULTILINE)
    assert described == parameters


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_that_are_named_exist(name: str) -> None:
    """Each is a class of `dcp.errors` or `dcp`, or of Python."""
    for error in re.findall(r"^    (\w+):", sections(FUNCTIONS[name])["Raises"], flags=re.MULTILINE):
        ours = error in dcp.errors.__all__ or error in dcp.__all__
        assert ours or error in ERRORS_OF_PYTHON, error
