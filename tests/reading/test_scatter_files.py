"""Files, objects, failures and interrupts where a request is dear."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

from dcp.storage import threads
from dcp.storage.engine import write
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import BoxRequest, Elements
from dcp.storage.errors import CorruptCheckpointError, PlanError, StorageError
from dcp.storage.formats import index as index_module
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.stores import MemoryStore
from dcp.storage.threads import WorkerThreads
from tests.support.recording import RecordingStore
from tests.support.stored_arrays import no_runs, runs_of, write_arrays


def fresh() -> RecordingStore:
    """A store of its own."""
    return RecordingStore(f"files-{uuid.uuid4().hex}")


def plain_twin(store: RecordingStore) -> MemoryStore:
    """The same files, read as from a disk."""
    return MemoryStore(store.url.removeprefix("memory://"))


def test_objects_of_one_file_are_read_together() -> None:
    """Three thousand objects between tensors take few requests, in whatever order they are asked for."""
    store = fresh()
    file = write.DataFile(store, "data.distcp", durable=False)
    blobs = [bytes([number % 251]) * (50 + number % 300) for number in range(3000)]
    places = [(0, *file.blob(blob)[:2]) for blob in blobs]
    file.finish()
    index = dataclasses.replace(
        write_arrays(store, [np.zeros(3, np.uint8)], name="other.distcp"),
        files=["data.distcp"],
        file_sizes=np.array([file.size_bytes]),
    )
    with ReadEngine(store, index, threads=2) as engine:
        assert engine.read_blobs([*reversed(places), places[0]]) == [*reversed(blobs), blobs[0]]
        assert engine.stats.bytes_read == file.size_bytes
    assert len(store.reads) == 1


@pytest.mark.parametrize("damage", ["remove", "truncate", "extend"])
def test_a_file_that_is_not_as_committed_is_damage_at_the_first_read(damage: str) -> None:
    """Opening asks nothing, so a missing or changed file shows when it is read, by the error of a disk."""
    store = fresh()
    index = write_arrays(store, [np.arange(1000, dtype=np.uint8)])
    data = bytes(store._file("data.distcp").data)
    store.delete("data.distcp")
    if damage != "remove":
        with store.create("data.distcp", durable=False) as handle:
            handle.write(data[:-1] if damage == "truncate" else data + b"x")
    target = np.zeros(1000, np.uint8)
    with ReadEngine(store, index) as engine, pytest.raises(CorruptCheckpointError, match=r"data\.distcp"):
        engine.run(runs_of([(0, 0, target)]), [])
    if damage == "remove":
        with ReadEngine(store, index) as engine, pytest.raises(CorruptCheckpointError, match="is missing"):
            engine.read_blobs([(0, 0, 10)])
    assert store.traffic().get("head", 0) == 0


def test_files_are_opened_without_a_request_and_beside_each_other() -> None:
    """Where sizes are known nothing is asked; where not, one question a file, and not one after the other."""
    store = fresh()
    indexes = [write_arrays(store, [np.full(10, n, np.uint8)], name=f"{n}.distcp") for n in range(3)]
    known = joined_index(indexes)
    assert open_all(store, known) == 0
    unknown = dataclasses.replace(known, file_sizes=np.full(3, index_module.UNKNOWN))
    meeting = threading.Barrier(3)

    class Meeting(RecordingStore):
        def note(self, op: str, received_bytes: int = 0) -> None:
            super().note(op, received_bytes)
            if op == "head":
                meeting.wait(240)

    assert open_all(Meeting(store.url.removeprefix("memory://")), unknown) == 3


def joined_index(indexes: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """One index of one array each from several files."""
    return dataclasses.replace(
        indexes[0],
        fqns=[f"t{n}" for n in range(len(indexes))],
        dtype_codes=np.concatenate([index.dtype_codes for index in indexes]),
        requires_grad=np.zeros(len(indexes), np.uint8),
        shape_start=index_module.starts([1] * len(indexes)),
        shape_values=np.concatenate([index.shape_values for index in indexes]),
        chunk_start=index_module.starts([1] * len(indexes)),
        chunk_offsets=np.zeros(len(indexes), np.int64),
        chunk_sizes=np.concatenate([index.chunk_sizes for index in indexes]),
        chunk_files=np.arange(len(indexes)),
        record_offsets=np.concatenate([index.record_offsets for index in indexes]),
        record_lengths=np.concatenate([index.record_lengths for index in indexes]),
        payload_offsets=np.concatenate([index.payload_offsets for index in indexes]),
        payload_lengths=np.concatenate([index.payload_lengths for index in indexes]),
        crc_start=index_module.starts([1] * len(indexes)),
        crcs=np.concatenate([index.crcs for index in indexes]),
        files=[index.files[0] for index in indexes],
        file_sizes=np.concatenate([index.file_sizes for index in indexes]),
    )


def open_all(store: RecordingStore, index: CheckpointIndex) -> float:
    """Read every array of ``index``; returns how many questions were asked."""
    targets = [np.zeros(10, np.uint8) for _ in range(3)]
    with ReadEngine(store, index, threads=3) as engine:
        engine.run(runs_of([(n, 0, target) for n, target in enumerate(targets)]), [])
    assert [int(target[0]) for target in targets] == [0, 1, 2]
    return store.traffic().get("head", 0)


def test_boxes_need_a_store_that_scatters() -> None:
    """The engine of a disk says so instead of leaving them out."""
    store = fresh()
    index = write_arrays(store, [np.zeros(3, np.uint8)])
    box = joining_box()
    with ReadEngine(plain_twin(store), index) as engine, pytest.raises(PlanError, match="units"):
        engine.run(no_runs(), [], boxes=[box])


def joining_box() -> BoxRequest:
    """A box that nobody takes."""
    return BoxRequest(Elements(0, 0, (3,), (1,)), lambda offsets, elements: None)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, StorageError])
def test_nothing_is_written_after_the_engine_has_left(failure: type[BaseException]) -> None:
    """One read fails, or is interrupted, while others are under way: the engine leaves only when these have
    ended, because they write to memory that the caller may free."""
    store = fresh()
    arrays = [np.full(8 << 20, number, np.uint8) for number in range(3)]
    index = write_arrays(store, arrays)
    targets = [np.zeros_like(array) for array in arrays]
    begun, go_on = threading.Barrier(3), threading.Event()
    first, ended = threading.Lock(), list[int]()

    class Held(RecordingStore):
        def note(self, op: str, received_bytes: int = 0) -> None:
            begun.wait(60)
            if first.acquire(blocking=False):
                raise failure("now")
            assert go_on.wait(60)
            ended.append(received_bytes)

    def load() -> None:
        with ReadEngine(Held(store.url.removeprefix("memory://")), index, threads=3) as engine:
            engine.run(runs_of([(n, 0, target) for n, target in enumerate(targets)]), [])

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(load)
        assert not wait([left], 0.2).done
        go_on.set()
        assert isinstance(left.exception(60), failure)
    assert len(ended) == 2


def test_a_second_interrupt_does_not_shorten_the_wait() -> None:
    """The wait for other threads' reads goes on through further interrupts, and ends in the first."""
    stop, release = threading.Event(), threading.Event()
    interrupts = iter([KeyboardInterrupt("second"), KeyboardInterrupt("third")])

    def interrupted(futures: Sequence[Future[None]], timeout: float) -> object:
        for error in interrupts:
            raise error
        release.set()
        return wait(futures, timeout)

    def hold() -> None:
        assert release.wait(60)

    with WorkerThreads(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "wait", interrupted)
        future = pool.submit(hold)
        with pytest.raises(KeyboardInterrupt, match="second"):
            threads._wait_to_the_end([future], stop, pool)
        assert future.done()
    assert stop.is_set()
