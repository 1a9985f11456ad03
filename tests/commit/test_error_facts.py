"""Facts that errors carry are declared. Internal: what ranks send of them is pure."""

from __future__ import annotations

import ast
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.errors import (
    CheckpointError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
    StorageError,
)
from dcp.storage import errors
from dcp.storage.errors import error_from_wire, error_to_wire

ROOT = Path(__file__).parents[2]
CLASSES = {name: vars(errors)[name] for name in errors.__all__ if name.endswith("Error")}


def given_facts() -> Iterator[tuple[str, str, str]]:
    """(where, class, fact) of each call of an error class in the source."""
    for folder in ("dcp", "planners", "storage", "server"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                    for keyword in node.keywords:
                        if keyword.arg is not None:
                            where = f"{path.relative_to(ROOT)}:{node.lineno}"
                            yield where, node.func.id, keyword.arg


def test_every_fact_that_is_given_is_declared() -> None:
    """A misspelt keyword would be a fact that nobody finds."""
    gc.disable()  # it takes longer than to parse
    facts = list(given_facts())
    gc.enable()
    assert len(facts) > 100
    assert not [fact for fact in facts if not hasattr(CLASSES[fact[1]], fact[2])]


def test_facts_have_defaults_and_come_through() -> None:
    """What is not known is the default; what is known comes back from a pickle and from another rank."""
    error = CorruptCheckpointError("differs", path="a.distcp", offset=7)
    assert (error.path, error.offset, error.fqn, error.rank, error.committed) == (
        "a.distcp",
        7,
        "",
        None,
        False,
    )
    assert error.facts == {"path": "a.distcp", "offset": 7}
    for copy in (pickle.loads(pickle.dumps(error)), error_from_wire(error_to_wire(error, "trace"))):
        assert type(copy) is CorruptCheckpointError
        assert (str(copy), copy.facts) == ("differs", error.facts)
    error.add_note("a note")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["a note"]
    full = StorageError("full", errno=28, path="x")
    assert (full.errno, full.facts) == (28, {"errno": 28, "path": "x"})
    error.committed = True
    assert error.facts["committed"]


@pytest.mark.parametrize("base", [PlanError, CheckpointError, ValueError, TypeError])
def test_a_wrong_option_is_one_class(base: type[Exception]) -> None:
    """Whatever somebody caught before catches it still."""
    assert issubclass(OptionError, base)
