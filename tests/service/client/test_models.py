"""Models of responses, without the service."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dcp.server.client import AnswerError, Client
from tests.support.scripted_service import Answer, scripted_service


@pytest.mark.parametrize("document", [None, [], {}, {"id": "x"}, {"id": 7, "kind": 3}])
def test_malformed_responses_raise(document: Any) -> None:
    """A malformed response raises a client error that names the model."""
    with (
        scripted_service(lambda request: Answer(200, document)) as service,
        pytest.raises(AnswerError, match="Job"),
    ):
        Client(service.url).job(7)


def test_the_client_imports_nothing_of_the_service() -> None:
    """The client imports no other part of the service, none of its dependencies, no torch and no numpy."""
    code = (
        "import sys, dcp.server.client;"
        "bad = {'torch', 'numpy', 'fastapi', 'pydantic', 'sqlalchemy'};"
        "service = {m for m in sys.modules if m.startswith('dcp.server.') and '.client' not in m};"
        "found = (bad & set(sys.modules)) | service; print(found); sys.exit(bool(found))"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, capture_output=True)
    assert ended.returncode == 0, ended.stdout
