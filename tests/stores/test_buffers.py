"""The pool of bounce buffers. Internal: its bound and its behaviour in a fork show nowhere else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp.storage.stores.buffers import ALIGNMENT_BYTES, BufferPool, copy_bytes

KIB = 1024


def test_buffers_are_aligned_and_reused() -> None:
    """A returned buffer is handed out again, so that its memory is touched once; all are page aligned."""
    pool = BufferPool(count=2, size_bytes=64 * KIB)
    first = pool.take()
    first.view[:3] = b"abc"
    assert ctypes.addressof(ctypes.c_char.from_buffer(first.view)) % ALIGNMENT_BYTES == 0
    assert len(first.view) == 64 * KIB
    pool.give(first)
    again = pool.take()
    assert again is first
    assert bytes(again.view[:3]) == b"abc"


def test_pool_is_bounded_but_never_blocks() -> None:
    """A second buffer is had only below the bound, a first one always; those beyond it are not kept."""
    pool = BufferPool(count=2, size_bytes=4 * KIB)
    taken = [pool.take() for _ in range(5)]
    assert pool.try_take() is None
    assert len({id(buffer) for buffer in taken}) == 5
    for buffer in taken:
        pool.give(buffer)
    kept = [pool.try_take(), pool.try_take()]
    assert all(buffer in taken for buffer in kept)
    assert pool.try_take() is None


def test_lost_buffers_do_not_count() -> None:
    """A buffer that an interrupted caller dropped takes no room for the rest of the process."""
    pool = BufferPool(count=1, size_bytes=4 * KIB)
    lost = pool.take()
    assert pool.try_take() is None
    del lost
    assert pool.try_take() is not None


def test_threads_never_share_a_buffer() -> None:
    """Under contention each buffer has one holder at a time, and the pool keeps its bound."""
    pool = BufferPool(count=3, size_bytes=4 * KIB)
    start = threading.Barrier(6)

    def work(n: int) -> bool:
        start.wait()
        mine = bytes([n]) * 64
        for _ in range(300):
            buffer = pool.try_take() or pool.take()
            buffer.view[:64] = mine
            if bytes(buffer.view[:64]) != mine:
                return False
            pool.give(buffer)
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    taken = [pool.try_take() for _ in range(3)]
    assert None not in taken
    assert pool.try_take() is None


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1_000_003])
def test_copy_bytes(size: int) -> None:
    """Short and long copies are exact, from read-only memory too."""
    source = bytes(n % 251 for n in range(size))
    target = bytearray(size)
    copy_bytes(memoryview(target), source)
    assert target == source


FORK = """
import os, sys, tempfile, threading
from dcp.storage.stores.buffers import BufferPool
from dcp.storage.stores import PosixStore

pool = BufferPool(count=2, size_bytes=4096)
outer = [pool.take(), pool.take()]
outer[0].view[:6] = b"parent"
stop = threading.Event()

def keep_taking():
    while not stop.is_set():
        pool.give(pool.take())

threading.Thread(target=keep_taking, daemon=True).start()
folder = tempfile.mkdtemp(dir=sys.argv[1])
store = PosixStore(folder)
handle = store.create("parent", durable=True)
handle.write(b"p" * (20 << 20))
child = os.fork()
if child == 0:
    inner = [pool.try_take(), pool.try_take()]
    assert None not in inner and inner[0] is not outer[0]
    outer[0].view[:6] = b"child!"
    pool.give(outer[0])
    assert pool.try_take() is None
    try:
        handle.write(b"c")
        handle.finish()
    except OSError as error:
        assert "was opened in process" in str(error), error
    else:
        sys.exit("a forked child wrote to its parent's file")
    handle.abort()
    with store.create("child", durable=True) as mine:
        mine.write(b"c" * (20 << 20))
    os._exit(0)
stop.set()
handle.write(b"p" * (20 << 20))
assert handle.finish() == 40 << 20
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bytes(outer[0].view[:6]) == b"parent"
assert store.read("parent", limit_bytes=1 << 30) == b"p" * (40 << 20)
assert store.read("child", limit_bytes=1 << 30) == b"c" * (20 << 20)
print("fine")
"""


def test_fork_starts_afresh(tmp_path: object) -> None:
    """A forked child has an empty pool and a free lock, and does not reach its parent's buffers and files."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
