"""Fixtures that several folders of tests share: a real S3 server, and one with a faulty network before it."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from dcp.demo.s3_server import S3Server
from tests.support.fault_proxy import FaultProxy
from tests.support.forking import set_preload

# Alike on every machine: the same examples, however long a busy one takes to make and to try them. Others are
# tried with --hypothesis-profile=default.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# Workers of xdist have one, as if each had a terminal; what our commands print would be cut to it.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background has Ctrl-C ignored, in all processes below, too; tests of it
# would wait for ever.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """The fork server starts with the first test that needs a process."""
    set_preload()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for this test process, started by the first test that wants it.

    Without the program ``weed`` such tests fail: nothing else checks signatures and conditional writes.
    """
    with S3Server(tmp_path_factory.mktemp("s3-server") / "data") as server:
        yield server


@pytest.fixture
def s3_root(s3_server: S3Server) -> str:
    """``s3://BUCKET/PREFIX``, of one test alone and with nothing below it."""
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """The server behind a proxy of this test alone, which logs requests and spoils some if asked."""
    with FaultProxy(s3_server) as proxy:
        yield proxy
