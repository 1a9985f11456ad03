"""What the tests of the writer process share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from dcp import AsyncCheckpointerType
from dcp.background.session import AsyncSession
from tests.support.warm_writers import cold_writers
from tests.support.writer_process import TIMEOUT_SECONDS


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[AsyncSession]:
    """One writer process for all tests of a module. For those of `test_process_writer` it is started as users
    have it, which costs seconds."""
    kind = AsyncCheckpointerType.PROCESS
    is_cold = request.path.stem == "test_process_writer"
    with cold_writers() if is_cold else contextlib.nullcontext():
        made = AsyncSession(no_dist=True, kind=kind, in_flight=2, timeout_seconds=TIMEOUT_SECONDS, start=True)
    yield made
    made.close(240)
