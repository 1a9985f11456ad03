"""Store contract: tests that every backend must pass.

Subclass the contract, provide a ``store`` fixture with an empty store, and collect the class with pytest::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

Override `raw_read` if the bytes are reachable without the store, to detect errors common to reads and
writes. Needs pytest; no other module of the package imports this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from dcp.storage.stores.base import ANY, LOCK_NAME, Store, Version

__all__ = ["BOUNDARY_SIZES", "StoreContract", "pattern_bytes"]

_MIB = 1 << 20

BOUNDARY_SIZES: Sequence[int] = (
    *(0, 1, 511, 512, 4095, 4096, 4097, 256 * 1024, _MIB - 1, _MIB, _MIB + 1),
    *(8 * _MIB - 1, 8 * _MIB, 8 * _MIB + 1, 16 * _MIB + 4096, 20 * _MIB + 7),
)
"""File sizes around the block and buffer sizes of writers."""

HOSTILE_NAMES: Sequence[str] = (
    *("", ".", "..", "/etc/passwd", "../up", "a/b", "a\\b", "nul\0", "x" * 256, "\udc80", LOCK_NAME),
)


def pattern_bytes(size: int, seed: int = 0) -> bytes:
    """Return bytes without repetition at powers of two, to detect misplaced blocks."""
    unit = bytes((7 * n + seed) % 251 for n in range(251))
    return (unit * (size // len(unit) + 1))[:size]


def write_file(store: Store, name: str, data: bytes, *, durable: bool = False, piece: int = 3 * _MIB) -> None:
    """Write a finished file in pieces."""
    with store.create(name, durable=durable, expected_bytes=len(data)) as handle:
        for start in range(0, len(data), piece):
            handle.write(memoryview(data)[start : start + piece])


class StoreContract:
    """Tests of a store backend. See the module's docstring.

    Subclasses declare permitted differences:

    - ``sees_unfinished``: unfinished files are visible. If False, a second file of the same name fails in
      `finish`.
    - ``keeps_replaced``: open handles can read a replaced file to the end. If False, such reads raise
      `CorruptCheckpointError`. None gives no guarantee; only checksums detect mixed contents.
    """

    sees_unfinished = True
    keeps_replaced: bool | None = True

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store with an existing root. Override this fixture."""
        raise TypeError(f"{type(self).__name__} must override the fixture 'store'")

    def raw_read(self, store: Store, name: str) -> bytes | None:
        """Return the bytes of a file without the store if possible; None if absent."""
        return None if store.stat(name) is None else store.read(name, limit_bytes=1 << 30)

    def reopen(self, store: Store) -> Store:
        """Return another store object for the same place."""
        return store

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.parametrize("size", BOUNDARY_SIZES)
    def test_round_trip(self, store: Store, size: int, durable: bool) -> None:
        """Files of any size around block and buffer boundaries are read back unchanged."""
        data = pattern_bytes(size)
        write_file(store, "data.bin", data, durable=durable)
        assert self.raw_read(store, "data.bin") == data
        with store.open_read("data.bin") as handle:
            assert handle.size_bytes == size
            assert handle.pread(size, 0) == data

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.parametrize("piece", [1, 4095, 300_000, 9 * _MIB])
    def test_pieces(self, store: Store, piece: int, durable: bool) -> None:
        """A file may be written in any pieces, and the position counts every accepted byte."""
        data = pattern_bytes(min(20_000 * piece, 19 * _MIB + 1))
        with store.create("data.bin", durable=durable) as handle:
            for start in range(0, len(data), piece):
                assert handle.position == start
                handle.write(data[start : start + piece])
        assert handle.position == len(data)
        assert self.raw_read(store, "data.bin") == data

    @pytest.mark.parametrize("durable", [False, True])
    def test_memory_may_be_reused_after_write(self, store: Store, durable: bool) -> None:
        """Memory may be changed after write() returns."""
        memory = bytearray(_MIB + 5)
        expected = b""
        with store.create("data.bin", durable=durable) as handle:
            for seed in range(12):
                memory[:] = pattern_bytes(len(memory), seed)
                expected += bytes(memory)
                handle.write(memory)
        assert self.raw_read(store, "data.bin") == expected

    def test_buffers_of_any_type(self, store: Store) -> None:
        """bytes, bytearray and views of any item type are written as bytes; strided views are refused."""
        data = pattern_bytes(24)
        with store.create("data.bin", durable=False) as handle:
            for part in (data, bytearray(data), memoryview(data).cast("I"), memoryview(b"").cast("d")):
                handle.write(part)
            with pytest.raises(TypeError):
                handle.write(memoryview(data)[::2])
        assert self.raw_read(store, "data.bin") == 3 * data

    @pytest.mark.parametrize("durable", [False, True])
    def test_many_files_at_once(self, store: Store, durable: bool) -> None:
        """More files than buffers can be open for writing, by one thread and by several."""
        handles = [store.create(f"a{n}", durable=durable) for n in range(5)]
        for _ in range(3):
            for n, handle in enumerate(handles):
                handle.write(pattern_bytes(3 * _MIB, n))
        for n, handle in enumerate(handles):
            assert handle.finish() == 9 * _MIB
            assert self.raw_read(store, f"a{n}") == 3 * pattern_bytes(3 * _MIB, n)
            store.delete(f"a{n}")

        def write(n: int) -> None:
            write_file(store, f"b{n}", pattern_bytes(9 * _MIB, n), durable=durable)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, range(5)))
        for n in range(5):
            assert self.raw_read(store, f"b{n}") == pattern_bytes(9 * _MIB, n)

    @pytest.mark.parametrize("size", [5, 20 * _MIB])
    def test_create_is_exclusive(self, store: Store, size: int) -> None:
        """Creating an existing name fails, even while unfinished, and keeps the bytes."""
        data = pattern_bytes(size)
        with store.create("data.bin", durable=False) as handle:
            if self.sees_unfinished:
                with pytest.raises(StorageError):
                    self.reopen(store).create("data.bin", durable=True)
            handle.write(data)
        with pytest.raises(StorageError) as caught:
            write_file(self.reopen(store), "data.bin", pattern_bytes(size, 1))
        assert caught.value.path == store.path_of("data.bin")
        assert self.raw_read(store, "data.bin") == data
        assert [info.name for info in store.list()] == ["data.bin"]

    @pytest.mark.parametrize("size", [5, 20 * _MIB])
    def test_create_replaces_if_asked(self, store: Store, size: int) -> None:
        """With replace, the new file replaces an old file or a missing file."""
        write_file(store, "data.bin", pattern_bytes(size))
        with store.create("data.bin", durable=True, replace=True) as handle:
            handle.write(pattern_bytes(size, 1))
        assert self.raw_read(store, "data.bin") == pattern_bytes(size, 1)
        store.create("new.bin", durable=True, replace=True).finish()
        assert [info.name for info in store.list()] == ["data.bin", "new.bin"]

    @pytest.mark.parametrize("size", [10, 20 * _MIB])
    @pytest.mark.parametrize("durable", [False, True])
    def test_abort(self, store: Store, durable: bool, size: int) -> None:
        """An aborted file is gone and its name free; aborting again, or after deletion, is fine."""
        handle = store.create("data.bin", durable=durable)
        handle.write(pattern_bytes(size))
        handle.abort()
        handle.abort()
        assert store.stat("data.bin") is None
        assert store.list() == []
        again = store.create("data.bin", durable=durable)
        store.delete("data.bin")
        again.abort()
        with pytest.raises(ValueError, match="aborted"):
            again.write(b"x")

    def test_finish_is_final(self, store: Store) -> None:
        """finish() may be repeated; afterwards abort() has no effect, and writing raises an error."""
        handle = store.create("data.bin", durable=True)
        handle.write(b"abc")
        assert handle.finish() == 3
        assert handle.finish() == 3
        handle.abort()
        with pytest.raises(ValueError, match="finished"):
            handle.write(b"")
        assert self.raw_read(store, "data.bin") == b"abc"

    def test_with_block_aborts_on_error(self, store: Store) -> None:
        """An exception inside the with block of a write handle removes the file."""
        with pytest.raises(KeyError), store.create("data.bin", durable=True) as handle:
            handle.write(b"half")
            raise KeyError("boom")
        assert store.stat("data.bin") is None

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    def test_names_are_validated(self, store: Store, name: str) -> None:
        """Every operation refuses names that are not a single plain path component."""
        calls: list[Callable[[], object]] = [
            partial(store.stat, name),
            partial(store.read, name, limit_bytes=10),
            partial(store.open_read, name),
            partial(store.create, name, durable=False),
            partial(store.version, name),
            partial(store.publish, name, b"", durable=False),
            partial(store.publish, name, b"", durable=False, expected=None),
            partial(store.delete, name),
        ]
        for call in calls:
            with pytest.raises(CheckpointFormatError):
                call()
        assert store.list() == []

    @pytest.mark.parametrize("name", ["a b", "ünïcode", "%2e%2e", ".hidden", "x" * 255, "*", "-rf"])
    def test_unusual_names(self, store: Store, name: str) -> None:
        """Every plain path component is a valid name."""
        write_file(store, name, b"1")
        assert [info.name for info in store.list()] == [name]
        assert self.raw_read(store, name) == b"1"
        store.delete(name)
        store.publish(name, b"2", durable=False)
        assert self.raw_read(store, name) == b"2"

    def test_missing_files(self, store: Store) -> None:
        """A missing file is None for stat and version, fine for delete, an error with its path for reads."""
        assert store.stat("nothing") is None
        assert store.version("nothing") is None
        store.delete("nothing")
        for call in (partial(store.read, "nothing", limit_bytes=1), partial(store.open_read, "nothing")):
            with pytest.raises(CheckpointNotFoundError) as caught:
                call()
            assert caught.value.path == store.path_of("nothing")

    def test_preadv_fills_buffers_in_order(self, store: Store) -> None:
        """One call fills thousands of buffers of all sizes, including 0, from any offset."""
        data = pattern_bytes(3 * _MIB)
        write_file(store, "data.bin", data)
        sizes = [(n * 37) % 900 for n in range(3000)] + [_MIB]
        memory = [bytearray(size) for size in sizes]
        with store.open_read("data.bin") as handle:
            handle.preadv([memoryview(part) for part in memory], 777)
            handle.preadv([], 5)
            words: memoryview[Any] = memoryview(bytearray(64)).cast("d").cast("B").cast("d", (2, 4))
            handle.preadv([words], 8)
        assert b"".join(memory) == data[777 : 777 + sum(sizes)]
        assert words.tobytes() == data[8:72]

    def test_preadv_from_many_threads(self, store: Store) -> None:
        """Several threads can read from one handle."""
        data = pattern_bytes(4 * _MIB)
        write_file(store, "data.bin", data)
        with store.open_read("data.bin") as handle, ThreadPoolExecutor(8) as threads:
            parts = list(threads.map(lambda n: handle.pread(65_536, n * 65_536), range(64)))
        assert b"".join(parts) == data

    @pytest.mark.parametrize(("offset", "length"), [(0, 101), (50, 51), (100, 1), (5000, 1)])
    def test_short_file_is_corrupt(self, store: Store, offset: int, length: int) -> None:
        """Reading past the end raises a typed error with the file name; it never returns fewer bytes."""
        write_file(store, "data.bin", pattern_bytes(100))
        with store.open_read("data.bin") as handle:
            with pytest.raises(CorruptCheckpointError) as caught:
                handle.preadv([memoryview(bytearray(length))], offset)
            assert caught.value.path == store.path_of("data.bin")
            assert handle.pread(50, 50) == pattern_bytes(100)[50:]

    def test_read_handle_closed(self, store: Store) -> None:
        """close() is idempotent, and a closed handle refuses to read."""
        write_file(store, "data.bin", b"abc")
        handle = store.open_read("data.bin")
        handle.close()
        handle.close()
        with pytest.raises(ValueError, match="closed"):
            handle.pread(1, 0)

    def test_read_limit(self, store: Store) -> None:
        """A file as large as the limit is read; one byte more is refused."""
        write_file(store, "data.bin", b"12345")
        assert store.read("data.bin", limit_bytes=5) == b"12345"
        with pytest.raises(CheckpointFormatError) as caught:
            store.read("data.bin", limit_bytes=4)
        assert caught.value.path == store.path_of("data.bin")

    def test_read_start(self, store: Store) -> None:
        """The result is the first bytes (all bytes of a short file) and the size of the file."""
        write_file(store, "data.bin", b"12345678")
        assert store.read_start("data.bin", 5) == (b"12345", 8)
        assert store.read_start("data.bin", 100) == (b"12345678", 8)
        with pytest.raises(CheckpointNotFoundError):
            store.read_start("absent", 5)

    def test_list_and_stat(self, store: Store) -> None:
        """Listing is sorted by name with sizes and times, shows temporary files and hides the lock."""
        before = time.time() - 60
        for name, size in (("b", 5), (".tmp-left", 1), ("a", 0)):
            write_file(store, name, bytes(size))
        with store.lock(timeout_seconds=60):
            listed = store.list()
        assert [(info.name, info.size_bytes) for info in listed] == [(".tmp-left", 1), ("a", 0), ("b", 5)]
        assert all(before < info.modified_seconds < time.time() + 60 for info in listed)
        assert [store.stat(info.name) for info in listed] == listed
        store.delete(".tmp-left")
        assert [info.name for info in store.list()] == ["a", "b"]

    def test_open_handle_and_replacement(self, store: Store) -> None:
        """A reader of a replaced file reads the old content or fails; never the new content."""
        store.publish("m", b"old", durable=False)
        with store.open_read("m") as handle:
            assert handle.pread(1, 0) == b"o"
            store.publish("m", b"new!", durable=False)
            if self.keeps_replaced:
                assert handle.pread(3, 0) == b"old"
            elif self.keeps_replaced is False:
                with pytest.raises(CorruptCheckpointError) as caught:
                    handle.pread(3, 0)
                assert caught.value.path == store.path_of("m")
        assert store.read("m", limit_bytes=9) == b"new!"

    def test_expected_size(self, store: Store) -> None:
        """Opening with the right size works; another size or a missing file fails."""
        data = pattern_bytes(5000)
        write_file(store, "data.bin", data)
        with store.open_read("data.bin", expected_bytes=5000) as handle:
            assert handle.pread(5000, 0) == data
        with pytest.raises(CheckpointNotFoundError), store.open_read("absent", expected_bytes=9) as handle:
            handle.pread(9, 0)
        for wrong in (4999, 5001):
            with store.open_read("data.bin", expected_bytes=wrong) as handle:
                if handle.size_bytes == wrong:  # a store may trust the size; reading then reports the error
                    with pytest.raises(CorruptCheckpointError):
                        handle.pread(wrong, 0)

    def test_delete_all(self, store: Store) -> None:
        """Several files are removed; missing files are no error, other files stay."""
        for name in ("a", "b", "c"):
            write_file(store, name, b"1")
        assert store.delete_all(["a", "missing", "c"]) == {}
        assert [info.name for info in store.list()] == ["b"]
        assert store.delete_all([]) == {}

    def test_unfinished_uploads(self, store: Store) -> None:
        """Selected uploads are aborted; other uploads and finished files stay."""
        write_file(store, "done.bin", pattern_bytes(20 * _MIB))
        kept, ended = store.create("kept.bin", durable=True), store.create("ended.bin", durable=True)
        for handle in (kept, ended):
            handle.write(pattern_bytes(20 * _MIB))
        count = store.abort_uploads(lambda name: name == "ended.bin")
        assert count in (0, 1)
        if count:
            with pytest.raises(CheckpointConflictError):
                ended.finish()
        ended.abort()
        assert kept.finish() == 20 * _MIB
        assert store.abort_uploads(lambda name: True) == 0
        assert [info.name for info in store.list()] == ["done.bin", "kept.bin"]

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.parametrize("size", [0, 10, 9 * _MIB + 1])
    def test_publish(self, store: Store, size: int, durable: bool) -> None:
        """Publishing creates and replaces, returns the version, and leaves no temporary file."""
        first = store.publish("m", pattern_bytes(size), durable=durable, expected=None)
        assert self.raw_read(store, "m") == pattern_bytes(size)
        assert store.version("m") == first
        second = store.publish("m", b"second", durable=durable, expected=first)
        assert store.version("m") == second != first
        third = store.publish("m", b"third", durable=durable, expected=ANY)
        assert self.raw_read(store, "m") == b"third"
        assert len({first, second, third}) == 3
        assert [info.name for info in store.list()] == ["m"]

    def test_publish_conflicts(self, store: Store) -> None:
        """Create-only over an existing file and replacement of changed content fail without effect."""
        old = store.publish("m", b"old", durable=False, expected=None)
        store.publish("m", b"new", durable=False)
        gone = Version("sha256:0")
        for name, expected in (("m", None), ("m", old), ("other", old), ("other", gone)):
            with pytest.raises(CheckpointConflictError) as caught:
                store.publish(name, b"mine", durable=True, expected=expected)
            assert caught.value.path == store.path_of(name)
        assert self.raw_read(store, "m") == b"new"
        assert [info.name for info in store.list()] == ["m"]

    def test_delete_if(self, store: Store) -> None:
        """Only compared content is removed; a missing file is no error."""
        store.make_root()
        first = store.publish("m", b"1", durable=False)
        second = store.publish("m", b"2", durable=False)
        assert not store.delete_if("m", first)
        assert store.read("m", limit_bytes=9) == b"2"
        assert store.delete_if("m", second)
        assert store.stat("m") is None
        assert store.delete_if("m", second)

    def test_create_only_race(self, store: Store) -> None:
        """Exactly one of eight threads that publish one new name wins, and its content stays."""
        for turn in range(5):
            winners = _race(8, partial(self._try_create, store, f"m{turn}"))
            assert len(winners) == 1
            assert self.raw_read(store, f"m{turn}") == b"%d" % winners[0]
        assert len(store.list()) == 5

    def _try_create(self, store: Store, name: str, n: int) -> bool:
        try:
            self.reopen(store).publish(name, b"%d" % n, durable=False, expected=None)
        except CheckpointConflictError:
            return False
        return True

    def test_compare_and_replace_loses_no_update(self, store: Store) -> None:
        """Eight threads increment one number by compare and replace: none is lost."""
        store.publish("counter", b"0", durable=False)
        assert len(_race(8, partial(self._increment, store, 5))) == 8
        assert self.raw_read(store, "counter") == b"40"

    def _increment(self, store: Store, times: int, _: int) -> bool:
        mine = self.reopen(store)
        while times:
            version = mine.version("counter")
            value = int(mine.read("counter", limit_bytes=20))
            if mine.version("counter") != version:
                continue
            try:
                mine.publish("counter", b"%d" % (value + 1), durable=False, expected=version)
            except CheckpointConflictError:
                continue
            times -= 1
        return True

    def test_lock_excludes_threads(self, store: Store) -> None:
        """At most one thread holds the lock."""
        inside: list[int] = []
        overlaps: list[int] = []

        def visit(n: int) -> bool:
            for _ in range(5):
                with self.reopen(store).lock(timeout_seconds=60):
                    inside.append(n)
                    time.sleep(0.0005)
                    overlaps.extend(other for other in inside if other != n)
                    inside.remove(n)
            return True

        assert len(_race(6, visit)) == 6
        assert overlaps == []

    def test_lock_times_out(self, store: Store) -> None:
        """Waiting for a held lock raises a typed error after the timeout; a released lock can be taken."""
        other = self.reopen(store)

        def wait_for_it() -> float:
            start = time.monotonic()
            with pytest.raises(StorageError), other.lock(timeout_seconds=0.2):
                pass
            return time.monotonic() - start

        with ThreadPoolExecutor(1) as threads:
            with store.lock(timeout_seconds=60):
                assert 0.15 < threads.submit(wait_for_it).result() < 100
            with other.lock(timeout_seconds=60):
                assert store.list() == []

    def test_lock_is_reentrant(self, store: Store) -> None:
        """The thread that holds the lock may take it again, and publish."""
        with store.lock(timeout_seconds=60), store.lock(timeout_seconds=0):
            version = store.publish("m", b"1", durable=False)
            store.publish("m", b"2", durable=False, expected=version)
        with store.lock(timeout_seconds=0):
            assert self.raw_read(store, "m") == b"2"

    def test_lock_is_released_on_error(self, store: Store) -> None:
        """An exception inside the lock releases it."""
        with pytest.raises(KeyError), store.lock(timeout_seconds=60):
            raise KeyError("boom")
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(lambda: _holds(self.reopen(store))).result()

    def test_sync_and_root(self, store: Store) -> None:
        """make_root and sync may be repeated; remove_root keeps a folder with a file."""
        store.make_root()
        write_file(store, "data.bin", b"abc", durable=True)
        store.sync()
        store.remove_root()
        assert self.raw_read(store, "data.bin") == b"abc"
        store.delete("data.bin")
        store.remove_root()
        store.remove_root()
        assert store.list() == []
        store.make_root()
        store.publish("m", b"1", durable=True, expected=None)
        assert self.raw_read(store, "m") == b"1"

    def test_many_small_files(self, store: Store) -> None:
        """Hundreds of files in turn: each releases its descriptor and buffer."""
        for n in range(300):
            write_file(store, f"f{n:03}", b"%d" % n)
        assert len(store.list()) == 300
        assert all(self.raw_read(store, f"f{n:03}") == b"%d" % n for n in range(0, 300, 17))


def _holds(store: Store) -> bool:
    with store.lock(timeout_seconds=60):
        return True


def _race(count: int, act: Callable[[int], bool]) -> list[int]:
    """Run ``act(n)`` in ``count`` threads started together; return the numbers with a True result."""
    start = threading.Barrier(count)

    def run(n: int) -> bool:
        start.wait()
        return act(n)

    with ThreadPoolExecutor(count) as threads:
        return [n for n, won in enumerate(threads.map(run, range(count))) if won]
