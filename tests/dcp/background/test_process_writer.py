"""Saves by a process of their own: what they hold, what becomes of failures, and that nothing piles up."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from dcp.background.future import SaveFuture
from dcp.background.session import AsyncSession
from dcp.progress import Progress
from dcp.saving.options import SaveOptions
from dcp.storage.errors import SaveAbortedError, WriterProcessError
from dcp.storage.stores import PosixStore, Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from tests.support.gates import FileGate, open_gated
from tests.support.ranks import run_ranks
from tests.support.user_storage import ItemReader, ItemWriter, PlainLoadPlanner, PlainSavePlanner
from tests.support.values import leaves
from tests.support.versions import ABSENT, listing, seen_by_dcp, seen_by_stock, version_state
from tests.support.writer_process import TIMEOUT_SECONDS, pid_of, until_heard

LARGE = 1 << 18
PROCESS = dcp.AsyncCheckpointerType.PROCESS


def overwrite(state: Any) -> None:
    """What training does next: other values in every tensor."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()


def save(session: AsyncSession, folder: Path, version: int, **options: Any) -> SaveFuture:
    """A save of one version, whose tensors are overwritten at once."""
    state = version_state(version, large=LARGE)
    writer = options.pop("writer", None) or dcp.FileSystemWriter(folder)
    future = session.save(state, storage_writer=writer, **options)
    overwrite(state)
    return future


def footprint(pid: int) -> tuple[int, int]:
    """Open file descriptors and resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")


def named_memory(pid: int) -> set[str]:
    """What a process maps that has a name in /dev/shm."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Whether something is so, within a minute or two: other threads and processes give things back late."""
    deadline = time.monotonic() + 120.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_gone(pid: int) -> bool:
    """Whether no such process exists, not even as a zombie."""
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("saves", [12, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_every_save_is_its_snapshot_and_nothing_piles_up(
    session: AsyncSession, tmp_path: Path, saves: int
) -> None:
    """Many saves of a state that changes at once; descriptors and memory of both processes stay as after
    the third, and neither has anything in /dev/shm."""
    others = named_memory(os.getpid())  # of tests before, which torch may keep
    before: list[tuple[int, int]] = []
    for version in range(1, saves + 1):
        future = save(session, tmp_path / str(version), version)
        metadata = future.result(TIMEOUT_SECONDS)
        assert seen_by_dcp(tmp_path / str(version), large=LARGE) == version
        assert set(metadata.state_dict_metadata) >= {"model.w", "large", "step"}
        assert future.outcome is not None
        assert future.outcome.seconds.keys() >= {"staging", "blocked", "write"}
        if version == 3:
            gc.collect()
            before = [footprint(os.getpid()), footprint(pid_of(session))]
    gc.collect()
    for pid, (fds, memory) in zip((os.getpid(), pid_of(session)), before, strict=True):
        assert becomes_true(lambda pid=pid, fds=fds: footprint(pid)[0] <= fds)  # type: ignore[misc]
        assert footprint(pid)[1] - memory < 24 << 20
    assert named_memory(os.getpid()) <= others and not named_memory(pid_of(session))
    assert seen_by_stock(tmp_path / str(saves), large=LARGE) == saves


def test_two_saves_under_way_are_both_whole(session: AsyncSession, tmp_path: Path) -> None:
    """The second is staged and sent while the first is being written."""
    gate = FileGate(tmp_path / "gate")
    held = dcp.FileSystemWriter(tmp_path / "1", open_store=partial(open_gated, gate=gate))
    futures = [save(session, tmp_path / "1", 1, writer=held), save(session, tmp_path / "2", 2)]
    assert session.pending() == 2
    gate.open()
    for future in futures:
        future.result(TIMEOUT_SECONDS)
    assert [seen_by_dcp(tmp_path / name, large=LARGE) for name in ("1", "2")] == [1, 2]


class Negating(dcp.DefaultSavePlanner):
    """A planner of torch's documentation, which takes torch's road."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Negate what is written."""
        object = super().transform_object(write_item, object)
        return -object if isinstance(object, torch.Tensor) else object


def test_custom_planner_and_storage(session: AsyncSession, tmp_path: Path) -> None:
    """Both run in the writer process, on staged copies; a foreign storage's metadata comes back."""
    state: dict[str, Any] = {"w": torch.arange(6.0), "tied": None, "step": 3}
    state["tied"] = state["w"]
    future = session.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "ours"), planner=Negating())
    overwrite(state)
    future.result(TIMEOUT_SECONDS)
    got: dict[str, Any] = {"w": torch.zeros(6), "tied": torch.zeros(6), "step": 0}
    dcp.load(got, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert got["w"].tolist() == got["tied"].tolist() == (-torch.arange(6.0)).tolist()
    assert got["step"] == 3

    state = {"w": torch.arange(6.0), "step": 4}
    writer = ItemWriter(tmp_path / "theirs")
    future = session.save(state, storage_writer=writer, planner=PlainSavePlanner())
    overwrite(state)
    assert set(future.result(TIMEOUT_SECONDS).state_dict_metadata) == {"w", "step"}
    assert writer.calls == []
    got = {"w": torch.zeros(6), "step": 0}
    dcp.load(got, storage_reader=ItemReader(tmp_path / "theirs"), planner=PlainLoadPlanner(), no_dist=True)
    assert got["w"].tolist() == torch.arange(6.0).tolist()


def test_what_the_process_cannot_import_is_refused(session: AsyncSession, tmp_path: Path) -> None:
    """A planner class of a function, one of the script itself, a lambda as store: the error says what to do,
    and the next save works."""

    class Local(Negating):
        """Nobody can import it."""

    script = type("Script", (Negating,), {"__module__": "__main__", "__qualname__": "Script"})
    cases: list[dict[str, Any]] = [
        {"planner": Local()},
        {"planner": script()},
        {"writer": dcp.FileSystemWriter(tmp_path / "x", open_store=lambda path: PosixStore(path))},
    ]
    for case in cases:
        future = save(session, tmp_path / "x", 1, **case)
        with pytest.raises(WriterProcessError, match="top level of a module") as caught:
            future.result(TIMEOUT_SECONDS)
        assert isinstance(caught.value, dcp.RankFailedError)
    assert seen_by_dcp(tmp_path / "x") == ABSENT
    save(session, tmp_path / "x", 2).result(TIMEOUT_SECONDS)
    assert seen_by_dcp(tmp_path / "x", large=LARGE) == 2


def test_an_error_of_the_storage_arrives_with_its_class(session: AsyncSession, tmp_path: Path) -> None:
    """A folder below a file cannot be made: StorageError with the operating system's number."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(dcp.errors.StorageError) as caught:
        save(session, tmp_path / "file" / "x", 1).result(TIMEOUT_SECONDS)
    assert isinstance(caught.value, dcp.RankFailedError)
    assert caught.value.ranks == [0]
    assert caught.value.facts["errno"] == 20


def test_abort_ends_a_save_that_is_being_written(session: AsyncSession, tmp_path: Path) -> None:
    """It fails with SaveAbortedError, nothing of it remains, and the one behind it is saved."""
    gate = FileGate(tmp_path / "gate")
    held = dcp.FileSystemWriter(tmp_path / "1", open_store=partial(open_gated, gate=gate))
    future = save(session, tmp_path / "1", 1, writer=held)
    following = save(session, tmp_path / "2", 2)
    gate.wait_until_reached()
    future.abort()
    until_heard(session)
    gate.open()
    with pytest.raises(SaveAbortedError):
        future.result(TIMEOUT_SECONDS)
    following.result(TIMEOUT_SECONDS)
    assert listing(tmp_path / "1") == {}
    assert seen_by_dcp(tmp_path / "2", large=LARGE) == 2


def test_progress_is_reported_to_the_trainer(session: AsyncSession, tmp_path: Path) -> None:
    """The callback runs here, up to the last byte."""
    reports: list[Progress] = []
    save(session, tmp_path / "x", 1, options=SaveOptions(progress=reports.append)).result(TIMEOUT_SECONDS)
    assert reports[-1].phase == "write"
    assert reports[-1].bytes_done == reports[-1].bytes_total > LARGE


def test_metadata_of_a_replaced_checkpoint_is_not_given_for_the_old_one(
    session: AsyncSession, tmp_path: Path
) -> None:
    """It is read when it is looked at; by then the id may hold something else."""
    old = save(session, tmp_path / "x", 1).result(TIMEOUT_SECONDS)
    new = save(session, tmp_path / "x", 2).result(TIMEOUT_SECONDS)
    assert "large" in new.state_dict_metadata
    with pytest.raises(dcp.errors.CheckpointConflictError, match="replaced"):
        _ = old.state_dict_metadata


def test_a_killed_process_costs_one_save(session: AsyncSession, tmp_path: Path) -> None:
    """The save after its death says how it died; the one after that goes through a new process."""
    save(session, tmp_path / "1", 1).result(TIMEOUT_SECONDS)
    first = pid_of(session)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WriterProcessError, match="rank 0 was killed by SIGKILL"):
        save(session, tmp_path / "1", 2).result(TIMEOUT_SECONDS)
    save(session, tmp_path / "3", 3).result(TIMEOUT_SECONDS)
    assert is_gone(first)
    assert pid_of(session) != first
    assert [seen_by_dcp(tmp_path / name, large=LARGE) for name in ("1", "3")] == [1, 3]


def test_close_finishes_what_was_begun_and_leaves_nothing(tmp_path: Path) -> None:
    """The save begun before it is committed; process, threads and descriptors are gone."""
    fds, threads = footprint(os.getpid())[0], set(threading.enumerate())
    session = AsyncSession(no_dist=True, kind=PROCESS, timeout_seconds=TIMEOUT_SECONDS)
    future = save(session, tmp_path / "x", 1)
    pid = pid_of(session)
    session.close()
    assert future.done()
    future.result()
    assert seen_by_dcp(tmp_path / "x", large=LARGE) == 1
    assert is_gone(pid)
    session.close()
    with pytest.raises(dcp.CheckpointError, match="closed"):
        save(session, tmp_path / "y", 1)
    del session, future
    gc.collect()
    assert becomes_true(lambda: footprint(os.getpid())[0] <= fds)
    assert becomes_true(lambda: set(threading.enumerate()) <= threads)


# -- two ranks -----------------------------------------------------------------------------------------------


def sharded(version: int) -> dict[str, Any]:
    """A state dict with a sharded, a replicated and a per-rank part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40.0).reshape(10, 4) * version
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": whole.sum(0),
        "mine": dcp.PerRank({"rank": dist.get_rank(), "version": version}),
    }


def loaded(folder: Path) -> tuple[list[float], list[float]]:
    """The sharded and the replicated tensor of a checkpoint, whole."""
    state = sharded(0)
    del state["mine"]
    dcp.load(state, checkpoint_id=folder)
    whole: DTensor = state["sharded"]
    return whole.full_tensor().flatten().tolist(), state["replicated"].tolist()


def failure_of(future: SaveFuture) -> tuple[set[str], str, list[int]]:
    """Class names, text and ranks of a save's error."""
    error = future.exception(TIMEOUT_SECONDS)
    names = {cls.__name__ for cls in type(error).__mro__}
    return names, str(error), list(getattr(error, "ranks", []))


def deadly_for(path: Any, rank: int) -> Store:
    """A store that cannot write on one rank."""
    store = FaultInjectingStore(PosixStore(path))
    if dist.get_rank() == rank:
        store.add(Fault("write", error=dcp.errors.StorageError("injected", errno=5)))
    return store


def save_on_two_ranks(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Saves and failures of one session of two ranks."""
    found: dict[str, Any] = {}
    session = AsyncSession(kind=PROCESS, timeout_seconds=TIMEOUT_SECONDS, in_flight=2)

    def start(name: str, version: int, **options: Any) -> SaveFuture:
        state = sharded(version)
        options.setdefault("storage_writer", dcp.FileSystemWriter(root / name))
        future = session.save(state, **options)
        overwrite({key: value for key, value in state.items() if key != "mine"})
        return future

    for name, version, options in (
        ("columns", 1, {}),
        ("again", 2, {}),
        ("planner", -3, {"planner": Negating()}),
    ):
        start(name, version, **options).result(TIMEOUT_SECONDS)
        found[name] = loaded(root / name)
    both = [start("p", 4), start("q", 5)]
    found["both"] = [
        future.result(TIMEOUT_SECONDS).state_dict_metadata.keys() >= {"sharded"} for future in both
    ]
    start("apart", 6, options=SaveOptions(use_collectives=False)).result(TIMEOUT_SECONDS)
    found["apart"] = sorted(listing(root / "apart"))
    failing = dcp.FileSystemWriter(root / "bad", open_store=partial(deadly_for, rank=1))
    found["bad"] = failure_of(start("bad", 7, storage_writer=failing))
    refused = Negating() if rank == 0 else type("Local", (Negating,), {})()
    found["refused"] = failure_of(start("bad", 7, planner=refused))
    gate = FileGate(root / f"gate-{rank}")
    held = dcp.FileSystemWriter(root / "bad", open_store=partial(open_gated, gate=gate))
    aborted = start("bad", 7, storage_writer=held)
    gate.wait_until_reached()
    if rank == 1:
        aborted.abort()
        until_heard(session)
    gate.open()
    found["aborted"] = failure_of(aborted)
    pid = pid_of(session)
    if rank == 1:
        os.kill(pid, signal.SIGKILL)
    found["killed"] = failure_of(start("bad", 7))
    start("after", 8).result(TIMEOUT_SECONDS)
    found["after"] = loaded(root / "after")
    pids = [pid, pid_of(session)]
    session.close(240)
    found["gone"] = all(map(is_gone, pids))
    dist.barrier()
    found["left"] = listing(root / "bad")
    return found


def test_two_ranks(tmp_path: Path) -> None:
    """Both roads save the snapshot; every failure is the same typed error on both ranks, names the rank, and
    leaves nothing; a killed writer costs one save."""
    for rank, found in enumerate(run_ranks(2, save_on_two_ranks, tmp_path)):
        for name, version in (("columns", 1), ("again", 2), ("planner", 3), ("after", 8)):
            whole = torch.arange(40.0).reshape(10, 4) * version
            assert found[name] == (whole.flatten().tolist(), whole.sum(0).tolist()), name
        assert found["both"] == [True, True]
        assert {"__0.manifest.msgpack", "__1.manifest.msgpack"} <= set(found["apart"])
        for name, cls, text in (
            ("bad", "StorageError", "injected"),
            ("refused", "WriterProcessError", "top level of a module"),
            ("aborted", "SaveAbortedError", "called off"),
            ("killed", "WriterProcessError", "rank 1 was killed by SIGKILL"),
        ):
            names, message, ranks = found[name]
            assert {"RankFailedError", cls} <= names, (rank, name, message)
            assert text in message, (rank, name, message)
            assert ranks == [1], (rank, name, message)
        assert found["gone"]
        assert found["left"] == {}
