"""Each way to save and load in stock torch, between stock and dcp."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks
from tests.support.values import differences, fill, scrub

SAFETENSORS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]
"""dtypes that the safetensors library can write."""

PACKAGES: dict[str, Any] = {"dcp": dcp, "stock": stock}
ROUTES = (("dcp", "dcp"), ("dcp", "stock"), ("stock", "dcp"))
State = dict[str, Any]

SHAPES = {"rows": (7, 6), "columns": (4, 5), "copy": (3, 3), "big": (40, 1024)}


def _plain_state() -> State:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def _sharded_state(world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    placements = {"rows": Shard(0), "columns": Shard(1), "copy": Replicate(), "big": Shard(1)}
    return {n: distribute_tensor(torch.zeros(SHAPES[n]), mesh, [p]) for n, p in placements.items()}


def _load_plain(rank: int, world: int, folder: str, package: str) -> list[str]:
    target = _plain_state()
    PACKAGES[package].load(target, checkpoint_id=folder)
    return differences(target)


def _load_sharded(rank: int, world: int, folder: str, package: str) -> list[str]:
    target = _sharded_state(world)
    PACKAGES[package].load(target, checkpoint_id=folder)
    return differences(target)


def _save_with(rank: int, world: int, folder: str, package: str, options: dict[str, Any]) -> None:
    writer = PACKAGES[package].FileSystemWriter(folder, **options)
    PACKAGES[package].save(fill(_sharded_state(world)), storage_writer=writer)


WRITERS = [
    ("stock", {"serialization_format": SerializationFormat.SAFETENSORS}),
    ("stock", {"serialization_format": SerializationFormat.SAFETENSORS, "single_file_per_rank": False}),
    ("stock", {"thread_count": 2}),
    ("stock", {"single_file_per_rank": False, "thread_count": 2}),
    ("stock", {"sync_files": False, "per_thread_copy_ahead": 0}),
    ("dcp", {"thread_count": 2}),
    ("dcp", {"single_file_per_rank": False}),
    ("dcp", {"single_file_per_rank": False, "thread_count": 3, "sync_files": False}),
]


@pytest.mark.parametrize(("package", "options"), WRITERS)
def test_writer_options_do_not_change_loaded_values(
    package: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Safetensors payloads, several threads or a file a tensor give equal bytes on any number of ranks."""
    folder = str(tmp_path / "x")
    run_ranks(2, _save_with, folder, package, options)
    for world in (1, 3):
        assert run_ranks(world, _load_sharded, folder, "dcp") == [[]] * world
    if package == "dcp":
        assert run_ranks(2, _load_sharded, folder, "stock") == [[], []]
    if options.get("single_file_per_rank") is False and package == "dcp":
        assert len(list(Path(folder).glob("__0_*.distcp"))) >= 3


def test_torch_compatible_off_writes_no_metadata(tmp_path: Path) -> None:
    """torch_compatible=False saves fewer bytes and no `.metadata`; only dcp loads the checkpoint."""
    small, large = str(tmp_path / "small"), str(tmp_path / "large")
    run_ranks(2, _save_with, small, "dcp", {"torch_compatible": False})
    run_ranks(2, _save_with, large, "dcp", {})
    assert run_ranks(3, _load_sharded, small, "dcp") == [[]] * 3
    assert not (tmp_path / "small" / ".metadata").exists()

    def stored(folder: str) -> int:
        return sum(file.stat().st_size for file in Path(folder).iterdir())

    assert stored(small) < stored(large) - 1000
    with pytest.raises(stock.CheckpointException):
        stock.load(_plain_state(), checkpoint_id=small)


def test_safetensors_payloads_of_every_dtype(tmp_path: Path) -> None:
    """dcp loads stock's safetensors payloads of each supported dtype, also 0-d and empty tensors."""

    shapes: dict[str, tuple[int, ...]] = {"some": (3, 700), "scalar": (), "empty": (0, 2)}

    def state() -> State:
        return {f"{n}.{t}": torch.empty(shape, dtype=t) for t in SAFETENSORS for n, shape in shapes.items()}

    writer = stock.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    stock.save(fill(state()), storage_writer=writer)
    target = scrub(state())
    dcp.load(target, checkpoint_id=tmp_path)
    assert differences(target) == []


# -- without collectives, without ranks, with some of the ranks -------------------------------------------


def save_alone(rank: int, world: int, folder: str, package: str) -> list[str]:
    """Save with use_collectives=False. Load on the same ranks, dcp's by both packages, stock's by dcp."""
    PACKAGES[package].save(fill(_sharded_state(world)), checkpoint_id=folder, use_collectives=False)
    dist.barrier()
    found = _load_sharded(rank, world, folder, "dcp")
    return found + (_load_sharded(rank, world, folder, "stock") if package == "dcp" else [])


@pytest.mark.parametrize("package", ["dcp", "stock"])
def test_saves_without_collectives_load_together(package: str, tmp_path: Path) -> None:
    """Saves with use_collectives=False load on the same ranks, and by dcp on any number of ranks."""
    folder = str(tmp_path / package)
    assert run_ranks(3, save_alone, folder, package) == [[]] * 3
    assert {file.name for file in Path(folder).glob("*.metadata")} == {f"__{r}.metadata" for r in range(3)}
    for world in (1, 2, 4):
        assert run_ranks(world, _load_sharded, folder, "dcp") == [[]] * world
    assert _load_plain(0, 1, folder, "dcp") == []


def in_a_group(rank: int, world: int, root: str, members: list[int]) -> list[str]:
    """Save and load in a group of some ranks, while the other ranks skip it. Return the differences."""
    group = dist.new_group(members)
    found = []
    for saver, loader in ROUTES:
        if rank not in members:
            continue
        place = members.index(rank)
        state = fill({f"stage{place}": torch.zeros(4, place + 1), "same": torch.zeros(3), "n": 1})
        folder = f"{root}/{saver}-{loader}"
        PACKAGES[saver].save(state, checkpoint_id=folder, process_group=group)
        target = scrub({f"stage{place}": torch.zeros(4, place + 1), "same": torch.zeros(3), "n": 0})
        PACKAGES[loader].load(target, checkpoint_id=folder, process_group=group)
        found += differences(target) + ([] if target["n"] == 1 else ["n"])
    return found


def test_a_subgroup_saves_and_loads(tmp_path: Path) -> None:
    """A process group whose first rank is not rank 0 has its own coordinator."""
    for members in ([2, 3], [1, 3], [3]):
        root = str(tmp_path / "".join(map(str, members)))
        assert run_ranks(4, in_a_group, root, members) == [[]] * 4


# -- overwriting -------------------------------------------------------------------------------------------


def overwritten(rank: int, world: int, folder: str) -> list[str]:
    """Overwrite each package's checkpoint by each package. Return the loads that differ."""
    found = []
    for number, saver in enumerate(("dcp", "stock", "dcp", "dcp", "stock", "stock", "dcp")):
        state = _sharded_state(world)
        for value in state.values():
            value.to_local().fill_(number)
        PACKAGES[saver].save(state, checkpoint_id=folder)
        for loader in PACKAGES:
            target = _sharded_state(world)
            PACKAGES[loader].load(target, checkpoint_id=folder)
            dist.barrier()
            if not all(value.to_local().eq(number).all() for value in target.values()):
                found.append(f"save {number} by {saver} read by {loader}")
    return found


def test_dcp_and_stock_overwrite_each_other(tmp_path: Path) -> None:
    """After each save of dcp or stock both load the last save; a save by dcp leaves no other data file."""
    assert run_ranks(2, overwritten, str(tmp_path)) == [[], []]
    index = dcp.open_index(str(tmp_path))
    assert sorted(file.name for file in tmp_path.glob("*.distcp")) == sorted(index.files)


# -- ways to call -------------------------------------------------------------------------------------------


def test_deprecated_functions_and_positional_storages_work(tmp_path: Path) -> None:
    """save_state_dict and load_state_dict, and a storage as second argument, work as in torch 2.0."""
    for number, saver in enumerate(PACKAGES.values()):
        for loader in PACKAGES.values():
            folder = str(tmp_path / str(number))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                saver.save_state_dict(fill(_plain_state()), saver.FileSystemWriter(folder), no_dist=True)
                target = _plain_state()
                loader.load_state_dict(target, loader.FileSystemReader(folder), no_dist=True)
            assert differences(target) == []
    with pytest.warns(FutureWarning, match="save_state_dict"):
        dcp.save_state_dict(_plain_state(), dcp.FileSystemWriter(tmp_path / "w"), no_dist=True)
    with pytest.warns(UserWarning, match="argument order"):
        dcp.save(fill(_plain_state()), dcp.FileSystemWriter(tmp_path / "p"))  # type: ignore[call-arg, arg-type]
    target = _plain_state()
    with pytest.warns(UserWarning, match="argument order"):
        dcp.load(target, dcp.FileSystemReader(tmp_path / "p"))  # type: ignore[call-arg, arg-type]
    assert differences(target) == []
