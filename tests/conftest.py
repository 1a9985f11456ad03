"""Hooks of a test run, and fixtures of the servers shared by several folders."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import pytest

from dcp.demo.s3_server import S3Server
from tests.support.examples import choose_profile, prepare_text
from tests.support.fault_proxy import FaultProxy
from tests.support.shared_servers import shared_server

pytest_plugins = ["tests.support.shards", "tests.support.shared_servers", "tests.support.summary"]

# Set before torch is imported. Several test processes share the cores, and waiting OpenMP threads take more
# than half of the time of some files.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers of xdist inherit COLUMNS from a terminal; output of the dcp commands would be truncated to this
# width.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background ignores Ctrl-C for all child processes. Tests of Ctrl-C
# would wait forever.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


if sys.platform == "linux":
    # glibc returns freed mmap blocks to the system, but each freed array raises the mmap threshold, up to 32
    # MiB. Each thread's heap then keeps up to 64 MiB, which malloc_trim does not release: hundreds of MiB in
    # the end. Explicit thresholds stay fixed (with 1 MiB some folders take 50 % longer). Threads share two
    # heaps.
    _libc = ctypes.CDLL("libc.so.6")
    _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
    for _option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        _libc.mallopt(_option, 8 << 20)
    _libc.mallopt(_M_ARENA_MAX, 2)


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer hypothesis examples if the exhaustive tests are left out."""
    choose_profile(is_quick="not exhaustive" in config.getoption("markexpr"))


@pytest.hookimpl(trylast=True)  # after hypothesis is ready, and before xdist starts workers
def pytest_sessionstart() -> None:
    """Create files shared by all workers once."""
    prepare_text()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during imports, and freeze the imported objects.

    Collection took a third of a worker's start, and Python before 3.11.8 may fail if a collection runs while
    a module is parsed (python/cpython#106905). Without the freeze each ``gc.collect()`` of a test took 0.4 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_MUCH_KIB: Final = 32 << 10
_held_kib = 0
_kept_kib = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage and trim memory after the last test of a file, and after a test that leaves much.

    Errors hold arrays in reference cycles. Objects that survive a file are frozen until they exceed a limit:
    clients become garbage long after their creation, with their buffers.
    """
    global _held_kib, _kept_kib
    is_last = nextitem is None or nextitem.path != item.path
    if not is_last and _resident_kib() < _held_kib + _MUCH_KIB:
        return
    if is_last and _resident_kib() > _kept_kib + 2 * _MUCH_KIB:
        gc.unfreeze()
        _kept_kib = _resident_kib()
    gc.collect()
    if is_last:
        gc.freeze()
    if sys.platform == "linux":
        _libc.malloc_trim(0)
    _held_kib = _resident_kib()


def _resident_kib() -> int:
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * resource.getpagesize() >> 10


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """Return the SeaweedFS server of the run, started by the first test that requests this fixture.

    Without the program ``weed`` these tests fail: no other test checks signatures and conditional writes.
    """
    return S3Server(**shared_server("s3", tmp_path_factory))


@pytest.fixture
def s3_root(s3_server: S3Server) -> str:
    """Return an empty ``s3://BUCKET/PREFIX`` for one test."""
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """Yield a proxy in front of the server, for one test: it logs requests and injects faults on request."""
    with FaultProxy(s3_server) as proxy:
        yield proxy
