"""The frame of a run: what holds for all tests, and servers that several folders share."""

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

# Before torch is there. Several processes of tests share the cores: threads of OpenMP that wait for one take
# more than half of the time of some files.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers of xdist have one, as if each had a terminal; what our commands print would be cut to it.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background has Ctrl-C ignored, in all processes below, too; tests of it
# would wait for ever.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


if sys.platform == "linux":
    # What glibc has taken with mmap goes back when it is freed, but each array so freed raises the size above
    # which it does that, to 32 MiB, and then the heap of each thread keeps up to 64 MiB for itself, which
    # malloc_trim does not touch: hundreds of MiB in the end. Sizes that are set stay as they are; with 1 MiB
    # some folders take half as long again. And threads share two heaps.
    _libc = ctypes.CDLL("libc.so.6")
    _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
    for _option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        _libc.mallopt(_option, 8 << 20)
    _libc.mallopt(_M_ARENA_MAX, 2)


def pytest_configure(config: pytest.Config) -> None:
    """Without the exhaustive tests, fewer examples of the others."""
    choose_profile(is_quick="not exhaustive" in config.getoption("markexpr"))


@pytest.hookimpl(trylast=True)  # only then hypothesis wants work to be done; xdist starts workers still later
def pytest_sessionstart() -> None:
    """What all workers share is made once."""
    prepare_text()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is collected until all is imported: that was a third of a worker's start, and Python before
    3.11.8 may fail if it happens while a module is parsed (python/cpython#106905). What is there by then
    stays: to look through it took each ``gc.collect()`` of a test 0.4 s."""
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
    """After the last test of a file, and after one that leaves much, garbage is collected, since errors hold
    arrays in cycles, and what was freed goes back to the system. After a file what is left stays, as above,
    until much is left: clients are given up long after they were made, with their buffers."""
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
    """One SeaweedFS for all processes of the run, started by the first test that wants it.

    Without the program ``weed`` such tests fail: nothing else checks signatures and conditional writes.
    """
    return S3Server(**shared_server("s3", tmp_path_factory))


@pytest.fixture
def s3_root(s3_server: S3Server) -> str:
    """``s3://BUCKET/PREFIX``, of one test alone and with nothing below it."""
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """The server behind a proxy of this test alone, which logs requests and spoils some if asked."""
    with FaultProxy(s3_server) as proxy:
        yield proxy
