"""What a save or load must not do when its objects are used again, ranks fail late, or memory is unusual."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.ranks.collectives import Ranks
from dcp.storage.commit import Names, discard
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CorruptCheckpointError,
    PlanError,
    ReplicaMismatchError,
)
from dcp.storage.reader import FileSystemReader, ReadRequest
from dcp.storage.stores import open_store
from dcp.storage.writer import FileSystemWriter
from tests.support.crashes import wait_for_end
from tests.support.ranks import RankDied, RankRaised, run_ranks


class Unpicklable:
    """Fails in the write step, when the data files are begun."""

    def __reduce__(self) -> Any:
        raise RuntimeError("bad \udcff name")


def values(path: Path, **wanted: torch.Tensor) -> dict[str, list[float]]:
    """The tensors of a checkpoint as lists."""
    dcp.load(wanted, checkpoint_id=path)
    return {name: tensor.tolist() for name, tensor in wanted.items()}


# -- objects that serve several saves or loads ---------------------------------------------------------------


def test_a_failed_save_leaves_what_the_same_writer_committed_before(tmp_path: Path) -> None:
    """A writer without a new id begins a new save all the same: its failure removes its own files only."""
    writer = FileSystemWriter(tmp_path)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    with pytest.raises(dcp.CheckpointError):
        dcp.save({"w": torch.zeros(4), "o": Unpicklable()}, storage_writer=writer)
    assert values(tmp_path, w=torch.zeros(4)) == {"w": [1.0] * 4}
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_reader_that_loads_again_sees_what_was_saved_since(tmp_path: Path) -> None:
    """Neither index nor figures of the first load are kept."""
    reader = FileSystemReader(tmp_path)
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), value)}, checkpoint_id=tmp_path)
        wanted = {"w": torch.zeros(4)}
        report = dcp.load(wanted, storage_reader=reader)
        assert wanted["w"].tolist() == [value] * 4
        assert report.bytes_needed == 16
        assert reader.read_metadata().state_dict_metadata.keys() == {"w"}


def test_options_of_one_load_do_not_stay(tmp_path: Path) -> None:
    """What `dcp.load` is told holds for that load, not for the reader's and planner's next one."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    reader, planner = FileSystemReader(tmp_path), dcp.DefaultLoadPlanner()
    wanted = {"w": torch.zeros(4, dtype=torch.float64), "more": torch.zeros(1)}
    options: dict[str, Any] = {"verify": "none", "dtype": "cast", "allow_partial_load": True}
    report = dcp.load(wanted, storage_reader=reader, planner=planner, **options)
    assert (report.cast, report.missing) == (["w"], ["more"])
    assert (reader.verify, planner.dtype, planner.allow_partial_load) == ("blocks", "exact", False)


@pytest.mark.parametrize("steps", [0, 1])
def test_options_hold_for_one_load_on_either_road(tmp_path: Path, steps: int) -> None:
    """On columns and by torch's protocol; stock's load with the same objects then goes by their own."""

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, central_plan: Any) -> Any:
            return super().finish_plan(central_plan)

    dcp.save({"w": torch.ones(4), "x": torch.ones(4)}, checkpoint_id=tmp_path)
    reader, planner = FileSystemReader(tmp_path), Planner() if steps else dcp.DefaultLoadPlanner()
    wanted = {"w": torch.zeros(4), "x": torch.zeros(4)}
    options: dict[str, Any] = {"verify": "none", "only": "w"}
    report = dcp.load(wanted, storage_reader=reader, planner=planner, **options)
    assert (report.blocks_verified, wanted["w"].tolist(), wanted["x"].tolist()) == (0, [1] * 4, [0] * 4)
    stock.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    assert reader.stats.blocks_verified > 0
    assert wanted["x"].tolist() == [1] * 4


@pytest.mark.parametrize("options", [{"verify": "ful"}, {"dtype": "casts"}])
def test_misspelt_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """A policy that nobody knows is not taken for the default one."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError):
        dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path, **options)


def test_the_report_names_missing_keys_with_a_planner_of_the_users(tmp_path: Path) -> None:
    """A subclass that plans with torch's objects reports as ours does."""

    class Planner(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            return super().commit_tensor(read_item, tensor)

    dcp.save({"w": torch.ones(4), "x": torch.ones(1)}, checkpoint_id=tmp_path)
    wanted = {"w": torch.zeros(4), "more": torch.zeros(1)}
    report = dcp.load(wanted, checkpoint_id=tmp_path, planner=Planner(allow_partial_load=True))
    assert (report.missing, report.unexpected) == (["more"], ["x"])


# -- what is committed stays ---------------------------------------------------------------------------------


def lose_rank_after_commit(rank: int, world_size: int, path: str) -> Any:
    """Rank 1 is killed after it told where its bytes are; rank 0 commits and cannot tell anybody."""
    broadcast = Ranks._broadcast
    pids: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(pids, os.getpid())

    def late(self: Ranks, data: bytes | None) -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_end(pids[1])
        return broadcast(self, data)

    Ranks._broadcast = late  # type: ignore[method-assign]
    try:
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=path, timeout_seconds=120)
    except dcp.CheckpointError as error:
        return error.facts.get("committed"), " ".join(error.__notes__)
    finally:
        Ranks._broadcast = broadcast  # type: ignore[method-assign]


def test_a_rank_lost_after_the_commit_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    """The save raises, and says that its checkpoint is committed; it loads."""
    results = run_ranks(2, lose_rank_after_commit, str(tmp_path), failures=True)
    assert isinstance(results[1], RankDied)
    committed, note = results[0]
    assert committed
    assert "is committed" in note
    assert values(tmp_path, w=torch.zeros(1000)) == {"w": [1.0] * 1000}


def test_discarding_spares_files_of_the_published_manifest(tmp_path: Path) -> None:
    """Also where the manifest cannot be read, because then nobody knows."""
    writer = FileSystemWriter(tmp_path)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    save_id = writer.index.provenance["save_id"] if writer.index else ""
    (tmp_path / f"__7_0.{save_id}.distcp").write_bytes(b"")
    store = open_store(tmp_path)
    discard(store, save_id, Names())
    assert [file.name for file in tmp_path.glob("*.distcp")] == [f"__0_0.{save_id}.distcp"]
    (tmp_path / "manifest.msgpack").write_bytes(b"damaged")
    discard(store, save_id, Names())
    assert len(list(tmp_path.glob("*.distcp"))) == 1


# -- failures that must reach everybody ----------------------------------------------------------------------


class FailsOnRankOne:
    """A Stateful whose state cannot be had on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        """Out of memory on rank 1."""
        if self.rank == 1:
            raise MemoryError("no memory for the state")
        return {"a": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not called in a load that fails."""
        raise AssertionError


class ShortPlanner(stock.DefaultSavePlanner):
    """Forgets a rank in its global plan."""

    def create_global_plan(self, all_plans: Any) -> Any:
        """The first rank's plan only."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans[:1], metadata


def fail_somehow(rank: int, world_size: int, path: str, how: str) -> None:
    """One rank, or the coordinator, fails where it is easy to leave the others waiting."""
    bounds: dict[str, Any] = {"checkpoint_id": path, "timeout_seconds": 120}
    if how == "state_dict in save":
        dcp.save({"s": FailsOnRankOne(rank)}, **bounds)
    elif how == "state_dict in load":
        dcp.save({"s": {"a": torch.ones(3)}}, **bounds)
        dcp.load({"s": FailsOnRankOne(rank)}, **bounds)
    elif how == "short plan":
        dcp.save({"w": torch.ones(3)}, planner=ShortPlanner(), **bounds)
    else:
        dcp.save({"w": torch.ones(3), "o": dcp.PerRank(Unpicklable() if rank else 1)}, **bounds)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("state_dict in save", "no memory for the state"),
        ("state_dict in load", "no memory for the state"),
        ("short plan", "1 parts for 2 ranks"),
        ("message that is not UTF-8", "name"),
    ],
)
def test_every_rank_hears_of_a_failure_at_once(tmp_path: Path, how: str, expected: str) -> None:
    """The others do not wait until their timeout, and learn the cause."""
    for result in run_ranks(2, fail_somehow, str(tmp_path), how, failures=True):
        assert isinstance(result, RankRaised)
        assert expected in result.message
        assert result.seconds < 100


# -- ranks that save on their own ----------------------------------------------------------------------------


def save_alone_and_load(rank: int, world_size: int, path: str, saver: str) -> Any:
    """Each rank saves other data under equal names, and loads."""
    state: dict[str, Any] = {"w": torch.full((5,), float(rank)), "o": rank}
    {"ours": dcp.save, "stock": stock.save}[saver](state, checkpoint_id=path, use_collectives=False)
    wanted: dict[str, Any] = {"w": torch.zeros(5), "o": -1}
    dcp.load(wanted, checkpoint_id=path)
    return wanted["w"].tolist(), wanted["o"]


@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_a_rank_loads_what_it_saved_on_its_own(tmp_path: Path, saver: str) -> None:
    """As with stock; one process, which is none of the ranks, cannot tell which to take."""
    assert run_ranks(2, save_alone_and_load, str(tmp_path), saver) == [([r * 1.0] * 5, r) for r in (0, 1)]
    if saver == "ours":
        with pytest.raises(ReplicaMismatchError):
            dcp.load({"w": torch.zeros(5)}, checkpoint_id=tmp_path)


def save_alone(rank: int, world_size: int, path: str) -> None:
    """Each rank saves on its own."""
    dcp.save({f"w{rank}": torch.ones(2)}, checkpoint_id=path, use_collectives=False)


def test_parts_that_an_older_world_left_are_not_mixed_in(tmp_path: Path) -> None:
    """After 3 ranks, 2 save under the same id: the third's part is of another checkpoint."""
    run_ranks(3, save_alone, str(tmp_path))
    run_ranks(2, save_alone, str(tmp_path))
    with pytest.raises(CheckpointFormatError, match="by 2 and by 3 ranks"):
        dcp.load({"w0": torch.zeros(2)}, checkpoint_id=tmp_path)


def test_ranks_do_not_save_on_their_own_under_a_common_checkpoint(tmp_path: Path) -> None:
    """Readers would go on loading the common one."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointConflictError):
        dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path, use_collectives=False)
    assert values(tmp_path, w=torch.zeros(4)) == {"w": [1.0] * 4}


# -- foreign storages ----------------------------------------------------------------------------------------


class Elsewhere(stock.FileSystemWriter):
    """A storage whose place only it knows."""

    @property
    def checkpoint_id(self) -> str:
        """Nothing that can be opened."""
        return "elsewhere://"


def save_elsewhere(rank: int, world_size: int, path: str) -> Any:
    """The metadata that each rank gets."""
    return sorted(dcp.save({"w": torch.ones(3)}, storage_writer=Elsewhere(path)).state_dict_metadata)


def test_every_rank_gets_the_metadata_of_a_foreign_storage(tmp_path: Path) -> None:
    """As from stock: not only the coordinator, and without opening the storage."""
    assert run_ranks(2, save_elsewhere, str(tmp_path)) == [["w"], ["w"]]


# -- memory --------------------------------------------------------------------------------------------------


def parameters(kind: str) -> torch.Tensor:
    """A destination of another dtype than stored."""
    if kind == "inference":
        with torch.inference_mode():
            return torch.zeros(300, 300, dtype=torch.bfloat16)
    return torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["requires grad", "inference"])
def test_casts_into_leaves_and_inference_tensors(tmp_path: Path, kind: str) -> None:
    """Autograd's rules are about computing; a load fills memory."""
    stored = torch.randn(300, 300)
    dcp.save({"w": stored}, checkpoint_id=tmp_path)
    target = parameters(kind)
    dcp.load({"w": target}, checkpoint_id=tmp_path, dtype="cast")
    assert torch.equal(target.detach(), stored.bfloat16())


def test_an_expanded_tensor_is_no_destination(tmp_path: Path) -> None:
    """Its elements share memory: rows would silently overwrite each other. torch refuses it, too."""
    dcp.save({"w": torch.arange(16.0).view(4, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match="'w' cannot be loaded into an expanded tensor"):
        dcp.load({"w": torch.zeros(1, 4).expand(4, 4)}, checkpoint_id=tmp_path)


def test_strided_four_bit_floats(tmp_path: Path) -> None:
    """torch has no strided copy of float4_e2m1fn_x2."""
    stored = torch.randint(0, 255, (600, 400), dtype=torch.uint8)
    for tensor in (stored, stored[:20]):
        dcp.save({"w": tensor.view(torch.float4_e2m1fn_x2).t()}, checkpoint_id=tmp_path)
        target = torch.zeros_like(tensor)
        dcp.load({"w": target.view(torch.float4_e2m1fn_x2).t()}, checkpoint_id=tmp_path)
        assert torch.equal(target, tensor)


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_runs_inside_of_others_are_read_whole(tmp_path: Path, verify: Any) -> None:
    """Tied tensors share a payload: one wanted whole, the other in part, overlap in the file."""
    stored = torch.arange(5000, dtype=torch.int32)
    dcp.save({"a": stored, "b": stored}, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path, verify=verify)
    whole, part = torch.zeros(4000, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with reader.engine(reader.read_index()) as engine:
        request = ReadRequest.of_rows([0, 1], [whole, part], [(0,), (100,)], [(0,), (0,)], [(4000,), (10,)])
        reader.read_request(engine, request)
    assert torch.equal(whole, stored[:4000])
    assert torch.equal(part, stored[100:110])


# -- limits --------------------------------------------------------------------------------------------------


@contextmanager
def open_file_limit(limit: int) -> Iterator[None]:
    """At most ``limit`` file descriptors in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_files_than_a_process_can_open(tmp_path: Path) -> None:
    """A checkpoint of many ranks, or of a file for each tensor, saves and loads under any limit."""
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(300)}
    wanted = {name: torch.zeros(10) for name in state}
    writer = FileSystemWriter(tmp_path, single_file_per_rank=False, sync_files=False)
    used = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
    with open_file_limit(used + 60):
        dcp.save(state, storage_writer=writer)
        dcp.load(wanted, storage_reader=FileSystemReader(tmp_path, threads=3))
    assert len(list(tmp_path.glob("*.distcp"))) == 300
    assert all(torch.equal(wanted[name], state[name]) for name in state)


def test_an_object_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """Where the format has no file sizes, the file itself bounds what is read."""
    stock.save({"o": {1, 2, 3}}, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path)
    index = reader.read_index()
    index.objects.lengths[:] = 1 << 50
    with reader.engine(index) as engine, pytest.raises(CorruptCheckpointError, match="truncated"):
        reader.read_object(engine, index.objects.fqns[0])


def test_blocks_of_a_payload_read_in_part_do_not_count_as_verified(tmp_path: Path) -> None:
    """Stock's records have one checksum for the whole: without all blocks nothing was compared."""
    stored = torch.randn(4 << 20)
    stock.save({"w": stored}, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path)
    index = reader.read_index()
    target = torch.zeros(2 << 20)
    with reader.engine(index) as engine:
        reader.read_request(engine, ReadRequest.of_rows([0], [target], [(0,)], [(0,)], [(2 << 20,)]))
        assert (engine.stats.blocks_verified, engine.stats.blocks_unverified) == (0, 2)
    assert torch.equal(target, stored[: 2 << 20])
