"""The client's models say what the service's answers say, without importing them."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest

import dcp.server.client
from dcp.server.client import AnswerError, Client
from tests.support.openapi import document
from tests.support.scripted_service import Answer, scripted_service


def test_models_have_the_members_of_answers() -> None:
    """Has a member for each of an answer's, and none that no answer has."""
    schemas = document()["components"]["schemas"].values()
    answers = [set(schema.get("properties", {})) - {"next_cursor"} for schema in schemas]
    shown = {one for _, one in inspect.getmembers(dcp.server.client, dataclasses.is_dataclass)}
    models: set[Any] = set()
    for model in shown - {dcp.server.client.JobEvent}:  # which comes in streams
        models |= reached(model)
    assert len(models) > 40
    for model in models:
        assert {field.name for field in dataclasses.fields(model)} in answers, model


def reached(kind: Any) -> set[Any]:
    """A model, and those that its members are made of."""
    if not dataclasses.is_dataclass(kind):
        return set().union(*(reached(one) for one in get_args(kind)))
    return {kind}.union(*(reached(one) for one in get_type_hints(kind).values()))


@pytest.mark.parametrize("document", [None, [], {}, {"id": "x"}, {"id": 7, "kind": 3}])
def test_answers_that_are_none(document: Any) -> None:
    """Raises an error of the client's tree, which says what is wrong."""
    with (
        scripted_service(lambda asked: Answer(200, document)) as service,
        pytest.raises(AnswerError, match="Job"),
    ):
        Client(service.url).job(7)


def test_the_client_imports_nothing_of_the_service() -> None:
    """Needs httpx, and neither the service's parts nor their dependencies, nor torch, nor numpy."""
    code = (
        "import sys, dcp.server.client;"
        "bad = {'torch', 'numpy', 'fastapi', 'pydantic', 'sqlalchemy', 'dcp.server.core.settings'};"
        "ours = {m for m in sys.modules if m.startswith('dcp.server.') and '.client' not in m"
        " and not m.startswith('dcp.server.records')};"
        "found = (bad & set(sys.modules)) | ours; print(found); sys.exit(bool(found))"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, capture_output=True)
    assert ended.returncode == 0, ended.stdout
