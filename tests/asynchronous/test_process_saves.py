"""Saves by a process of their own: what they hold, what becomes of failures, and that nothing piles up."""

from __future__ import annotations

import gc
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.errors import CheckpointConflictError, SaveAbortedError, StorageError, WriterProcessError
from dcp.state_dict_saver import SaveFuture
from dcp.storage.stores import PosixStore, Store
from tests.support.background import FileGate, NotedPids, gated_writer, slow_writer
from tests.support.manager_runs import Fault, FaultyWriter, manager_of, until
from tests.support.processes import lives, mapped_files
from tests.support.programs import Program
from tests.support.ranks import run_ranks
from tests.support.user_storage import ItemReader, ItemWriter, PlainLoadPlanner, PlainSavePlanner
from tests.support.values import leaves, raw
from tests.support.versions import ABSENT, listing, seen_by_dcp, version_state

LARGE = 1 << 18
PROCESS = dcp.AsyncCheckpointerType.PROCESS
by_process = partial(dcp.async_save, no_dist=True, async_checkpointer_type=PROCESS)


def overwrite(state: Any) -> None:
    """What training does next: other values in every tensor."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()


def save(folder: Path, version: int, **options: Any) -> SaveFuture:
    """A save of one version, whose tensors are overwritten at once."""
    state = version_state(version, large=LARGE)
    options.setdefault("storage_writer", dcp.FileSystemWriter(folder, sync_files=False))
    future = by_process(state, **options)
    overwrite(state)
    return future


def saved_by(pid: int, folder: Path, version: int) -> bool:
    """Whether a save is right, and it was that process that wrote it."""
    noted = NotedPids(folder.with_name(f"{folder.name}-pids"))
    save(folder, version, storage_writer=noted.writer(folder)).result(240)
    return seen_by_dcp(folder, large=LARGE) == version and noted.others() == [pid]


@pytest.fixture
def writer(tmp_path: Path) -> int:
    """The writer process of this process's saves, which lives from one test to the next."""
    noted = NotedPids(tmp_path / "pids")
    save(tmp_path / "first", 1, storage_writer=noted.writer(tmp_path / "first")).result(240)
    (pid,) = noted.others()
    return pid


def test_two_saves_under_way_are_both_whole(tmp_path: Path, writer: int) -> None:
    """The second is staged and sent while the first is being written; the trainer is told of progress."""
    gate = FileGate(tmp_path / "gate")
    reports: list[Any] = []
    futures = [
        save(tmp_path / "1", 1, storage_writer=gated_writer(tmp_path / "1", gate)),
        save(tmp_path / "2", 2, progress=reports.append),
    ]
    assert not futures[0].done()
    gate.open()
    for future in futures:
        future.result(240)
    assert [seen_by_dcp(tmp_path / name, large=LARGE) for name in ("1", "2")] == [1, 2]
    assert reports[-1].phase == "write"
    assert reports[-1].bytes_done == reports[-1].bytes_total > LARGE


def test_values_of_any_kind_arrive_as_they_were(tmp_path: Path, writer: int) -> None:
    """Strides of views, dtypes, ties, empty and conjugated tensors, large values beside tensors."""
    weight = torch.nn.Parameter(torch.randn(50, 40))
    state: dict[str, Any] = {
        "weight": weight,
        "tied": weight,
        "transposed": torch.randn(6, 7).t(),
        "every second": torch.arange(20)[::2],
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.zeros(0, 5),
        "bf16": torch.randn(9).to(torch.bfloat16),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False]),
        "nested": {"three": torch.ones(2), "vocabulary": os.urandom(3 << 20)},
    }
    by_process(state, checkpoint_id=tmp_path / "x").result(240)
    got = dcp.read(tmp_path / "x")
    for (name, found), (_, wanted) in zip(leaves(got), leaves(state), strict=True):
        if isinstance(wanted, torch.Tensor):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
            assert raw(found) == raw(wanted.detach()), name
        else:
            assert found == wanted, name


class Negating(dcp.DefaultSavePlanner):
    """A planner of torch's documentation, which overrides a step."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Negate what is written."""
        object = super().transform_object(write_item, object)
        return -object if isinstance(object, torch.Tensor) else object


def test_planner_and_storage_of_a_user(tmp_path: Path, writer: int) -> None:
    """Both run in the writer process, on staged copies; a foreign storage's metadata comes back."""
    state: dict[str, Any] = {"w": torch.arange(6.0), "step": 3}
    future = by_process(state, checkpoint_id=tmp_path / "ours", planner=Negating())
    overwrite(state)
    future.result(240)
    assert dcp.read(tmp_path / "ours")["w"].tolist() == (-torch.arange(6.0)).tolist()
    state = {"w": torch.arange(6.0), "step": 4, "vocabulary": os.urandom(3 << 20)}
    foreign = ItemWriter(tmp_path / "theirs")
    future = by_process(state, storage_writer=foreign, planner=PlainSavePlanner())
    wanted = state["vocabulary"]
    overwrite(state)
    assert set(future.result(240).state_dict_metadata) == {"w", "step", "vocabulary"}
    assert foreign.calls == []
    got = {"w": torch.zeros(6), "step": 0, "vocabulary": b""}
    dcp.load(got, storage_reader=ItemReader(tmp_path / "theirs"), planner=PlainLoadPlanner(), no_dist=True)
    assert got["w"].tolist() == torch.arange(6.0).tolist() and got["vocabulary"] == wanted  # type: ignore[attr-defined]


class Noting:
    """Opens folders, and notes the environment where it does so; with a ``pid`` in that process only."""

    def __init__(self, place: Path, pid: int = 0) -> None:
        self.place, self.pid = place, pid

    def __call__(self, path: str | os.PathLike[str]) -> Store:
        """The folder."""
        Path(f"{self.place}-{os.getpid()}").write_text(json.dumps(dict(os.environ)))
        return PosixStore(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _noting, (self.place, self.pid)


def _noting(place: Path, pid: int) -> Noting:
    if pid not in (0, os.getpid()):
        raise OSError("this is no place to work")
    return Noting(place, pid)


def test_the_writers_environment(tmp_path: Path, writer: int) -> None:
    """The trainer's, but devices are hidden, and the module search path comes along."""
    noting = dcp.FileSystemWriter(tmp_path / "x", open_store=Noting(tmp_path / "environment"))
    by_process({"w": torch.ones(1)}, storage_writer=noting).result(240)
    environment = json.loads((tmp_path / f"environment-{writer}").read_text())
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["HOME"] == os.environ["HOME"]
    assert "MASTER_ADDR" not in environment and environment["PYTHONPATH"]


def test_what_the_process_cannot_rebuild_is_refused(tmp_path: Path, writer: int) -> None:
    """A planner class of a function, one of the script itself, a lambda as store, an object of this process
    only: the error says what to do, and does not spoil the next save."""

    class Local(Negating):
        """Nobody can import it."""

    script = type("Script", (Negating,), {"__module__": "__main__", "__qualname__": "Script"})
    here = Noting(tmp_path / "environment", os.getpid())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"planner": Local()}, "top level of a module"),
        ({"planner": script()}, "top level of a module"),
        (
            {"storage_writer": dcp.FileSystemWriter(tmp_path / "x", open_store=lambda p: PosixStore(p))},
            "top level of a module",
        ),
        ({"storage_writer": dcp.FileSystemWriter(tmp_path / "x", open_store=here)}, "no place to work"),
    ]
    for case, text in cases:
        with pytest.raises(WriterProcessError, match=text) as caught:
            save(tmp_path / "x", 1, **case).result(240)
        assert isinstance(caught.value, dcp.RankFailedError)
    assert seen_by_dcp(tmp_path / "x") == ABSENT
    assert saved_by(writer, tmp_path / "x", 2)


def test_errors_arrive_with_class_rank_and_traceback(tmp_path: Path, writer: int) -> None:
    """A folder below a file cannot be made: StorageError with the operating system's number."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError) as caught:
        save(tmp_path / "file" / "x", 1).result(240)
    assert isinstance(caught.value, dcp.RankFailedError) and caught.value.ranks == [0]
    assert caught.value.facts["errno"] == 20
    assert saved_by(writer, tmp_path / "x", 2)


def test_a_cancelled_save_leaves_nothing(tmp_path: Path, writer: int) -> None:
    """Neither one that is being written nor the one behind it; the next one is saved by the same process."""
    slow = slow_writer(tmp_path / "1", 0.1)
    state = {f"w{number}": torch.ones(1 << 14) for number in range(60)}
    futures = [by_process(state, storage_writer=slow), save(tmp_path / "2", 2)]
    until(lambda: list((tmp_path / "1").glob("*")), "the beginning of the save")
    for future in futures:
        future.abort()  # which does not wait, as `cancel` does
    assert [future.cancel() for future in futures] == [True, True]
    assert all(isinstance(future.exception(), SaveAbortedError) for future in futures)
    assert not (tmp_path / "1").exists() and not (tmp_path / "2").exists()
    assert saved_by(writer, tmp_path / "3", 3)


def test_metadata_is_that_of_the_save(tmp_path: Path, writer: int) -> None:
    """It is read when it is looked at; by then the id may hold something else, which is an error."""
    old = save(tmp_path / "x", 1).result(240)
    new = save(tmp_path / "x", 2).result(240)
    assert "large" in new.state_dict_metadata
    with pytest.raises(CheckpointConflictError, match="replaced"):
        _ = old.state_dict_metadata


def test_a_sigterm_to_all_processes_costs_no_save(tmp_path: Path, writer: int) -> None:
    """Not the one under way, nor the last one, which training gives after it; nor does Ctrl-C."""
    gate = FileGate(tmp_path / "gate")
    under_way = save(tmp_path / "1", 1, storage_writer=gated_writer(tmp_path / "1", gate))
    gate.wait_until_reached()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(writer, number)
    gate.open()
    under_way.result(240)
    assert saved_by(writer, tmp_path / "2", 2)


def test_a_killed_process_costs_one_save(tmp_path: Path, writer: int) -> None:
    """The save after its death says how it died; the one after that goes through a new process."""
    save(tmp_path / "1", 1).result(240)
    os.kill(writer, signal.SIGKILL)
    with pytest.raises(WriterProcessError, match="rank 0 was killed by SIGKILL"):
        save(tmp_path / "1", 2).result(240)
    noted = NotedPids(tmp_path / "new-pids")
    save(tmp_path / "3", 3, storage_writer=noted.writer(tmp_path / "3")).result(240)
    assert not lives(writer) and noted.others() != [writer]
    assert [seen_by_dcp(tmp_path / name, large=LARGE) for name in ("1", "3")] == [1, 3]


@pytest.mark.exhaustive
def test_managers_have_a_process_each_and_leave_none(tmp_path: Path) -> None:
    """SIGKILL of one's fails one save of that manager only. After close processes and host memory are gone,
    though a future is kept, and what was begun before it is committed."""

    def mapped() -> int:
        gc.collect()
        return sum("memfd:dcp-staging" in line for line in mapped_files())

    memory = mapped()
    noted = [NotedPids(tmp_path / name) for name in ("pids-a", "pids-b")]
    one = manager_of(tmp_path / "a", mode="process", retries=0, writer=noted[0].writer)
    other = manager_of(tmp_path / "b", mode="process", writer=noted[1].writer)
    for manager in (one, other):
        manager.save(1, version_state(1))
        assert manager.wait(240)
    (first,), (second,) = (each.others() for each in noted)
    assert first != second
    os.kill(first, signal.SIGKILL)
    kept = other.save(2, version_state(2))
    lost = one.save(2, version_state(2))
    assert lost is not None and isinstance(lost.exception(240), WriterProcessError)
    one.close()
    other.close()
    assert kept is not None and kept.done() and seen_by_dcp(tmp_path / "b" / "step-00000002") == 2
    assert (one.failures, other.failures, one.all_steps()) == (1, 0, [1])
    assert not lives(first) and not lives(second) and mapped() <= memory


_FORKED = """
import os, signal, sys, torch, dcp
from tests.support.processes import children
sys.path.insert(0, sys.argv[1])  # where a sitecustomize keeps the writer from looking at its trainer
future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1] + "/1", no_dist=True,
                        async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS)
(writer,) = children(os.getpid())
forked = os.fork()
if forked == 0:
    signal.pause()
open(sys.argv[1] + "/pids", "w").write(f"{writer} {forked}")
os.kill(os.getpid(), signal.SIGKILL)
"""

_HELD = """
import os, time
while not os.path.exists({gate!r}):
    time.sleep(0.01)
"""


@pytest.mark.exhaustive
def test_a_writer_ends_though_its_trainer_died_before_and_left_a_fork(tmp_path: Path) -> None:
    """Such as a data loader's worker, which holds the writer's socket open for as long as it lives."""
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(_HELD.format(gate=str(gate)))
    assert Program("-c", _FORKED, tmp_path).wait(240) == -signal.SIGKILL
    writer, forked = map(int, (tmp_path / "pids").read_text().split())
    gate.touch()
    try:
        until(lambda: not lives(writer), "the end of the writer")
        assert lives(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


# -- two ranks -----------------------------------------------------------------------------------------------


def failure_of(future: SaveFuture) -> tuple[set[str], str, list[int]]:
    """Class names, text and ranks of a save's error."""
    error = future.exception(240)
    return {cls.__name__ for cls in type(error).__mro__}, str(error), list(getattr(error, "ranks", []))


def fail_on_two_ranks(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Failures of one rank, and what both save apart from each other and after that."""
    found: dict[str, Any] = {}

    def start(name: str, **options: Any) -> SaveFuture:
        state = {"w": torch.arange(40.0), "mine": dcp.PerRank(rank)}
        options.setdefault("storage_writer", dcp.FileSystemWriter(root / name))
        return dcp.async_save(state, async_checkpointer_type=PROCESS, **options)

    start("apart", use_collectives=False).result(240)
    faults = [Fault("write", error=StorageError("injected", errno=5))] if rank == 1 else []
    found["bad"] = failure_of(start("bad", storage_writer=FaultyWriter(faults)(root / "bad")))
    refused = Negating() if rank == 0 else type("Local", (Negating,), {})()
    found["refused"] = failure_of(start("bad", planner=refused))
    start("after", planner=Negating()).result(240)
    dist.barrier()
    return found | {"left": listing(root / "bad"), "apart": sorted(listing(root / "apart"))}


@pytest.mark.exhaustive
def test_failures_on_one_of_two_ranks(tmp_path: Path) -> None:
    """Each is the same typed error on both ranks, names the rank, and leaves nothing; the next is saved."""
    for found in run_ranks(2, fail_on_two_ranks, tmp_path):
        assert {"__0.manifest.msgpack", "__1.manifest.msgpack"} <= set(found["apart"])
        for name, kind, text in (
            ("bad", "StorageError", "injected"),
            ("refused", "WriterProcessError", "top level of a module"),
        ):
            names, message, ranks = found[name]
            assert {"RankFailedError", kind} <= names and text in message and ranks == [1], (name, message)
        assert found["left"] == {}
    assert dcp.read(tmp_path / "after")["w"].equal(-torch.arange(40.0))
