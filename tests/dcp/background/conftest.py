"""What the tests of the writer process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp import AsyncCheckpointerType
from dcp.background.session import AsyncSession
from tests.support.writer_process import TIMEOUT_SECONDS


@pytest.fixture(scope="module")
def session() -> Iterator[AsyncSession]:
    """One writer process for all tests of a module."""
    kind = AsyncCheckpointerType.PROCESS
    made = AsyncSession(no_dist=True, kind=kind, in_flight=2, timeout_seconds=TIMEOUT_SECONDS, start=True)
    yield made
    made.close(240)
