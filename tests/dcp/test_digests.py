"""One digest a tensor, whatever the ranks, sharding and format; computed while saving, or by reading."""

from __future__ import annotations

import json
import pickle
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typer.testing import CliRunner

import dcp
from dcp.cli.app import app
from dcp.inspection.findings import VerifyReport
from dcp.inspection.payload_checks import PayloadChecks
from dcp.inspection.streamed_sums import StreamedSums
from dcp.inspection.values.difference import diff
from dcp.inspection.values.digests import digests
from dcp.inspection.verification import verify, verify_place
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.dropped import without
from dcp.storage.formats.dtypes import BY_NAME
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening.sources import SourcePlace, index_at, locate
from dcp.storage.stores.posix.store import PosixStore
from tests.support.ranks import run_ranks
from tests.support.sharded import grid, save_sharded

State = dict[str, Any]


def full_state() -> State:
    """Tensors whose rows, columns and items fall within blocks of 16 bytes in all ways."""
    made = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(8, 6, generator=made),
        "odd": torch.randn(7, 5, generator=made).bfloat16(),
        "bytes": torch.randint(0, 255, (9, 13), dtype=torch.uint8, generator=made),
        "deep": torch.randn(4, 6, 8, generator=made).half(),
        "large": torch.randn(256, 1100, generator=made),
        "complex": torch.randn(6, 8, dtype=torch.complex64, generator=made),
        "small": torch.arange(3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }


def told(place: Path | str, **options: Any) -> dict[str, str]:
    """Digests by name; those that had to be read fail the test unless it asks for that."""
    found = digests(str(place), **options)
    return {tensor.fqn: tensor.digest for tensor in found.tensors}


def writer(place: Path | str, **options: Any) -> dcp.FileSystemWriter:
    """One that computes digests."""
    return dcp.FileSystemWriter(place, digests=True, **options)


HALVES = {"rules": [{"from": {"a": "(x + y) c"}, "to": {"top": "x c", "low": "c y"}, "sizes": {"x": 13}}]}
"""A map that cuts the rows of one tensor, and transposes the rest."""


def known(place: Path | str) -> dict[str, str]:
    """Those of the manifest alone."""
    found = digests(str(place))
    assert found.bytes_read == 0 and not any(tensor.is_read for tensor in found.tensors)
    return {tensor.fqn: tensor.digest for tensor in found.tensors}


def save_with_placements(rank: int, world: int, folder: str, how: str) -> None:
    """Save `full_state` by one placement on all ranks; in two dimensions on a grid."""
    mesh = init_device_mesh("cpu", (2, world // 2) if how == "grid" else (world,))
    places: dict[str, list[Placement]] = {
        "grid": [Shard(0), Shard(1)],
        "copy": [Replicate()],
        "0": [Shard(0)],
        "1": [Shard(1)],
    }
    state = {
        name: distribute_tensor(full, mesh, places[how]) if full.ndim >= 2 else full
        for name, full in full_state().items()
    }
    dcp.save(state, storage_writer=writer(folder))


@pytest.mark.parametrize("how", ["grid", pytest.param("1", marks=pytest.mark.exhaustive)])
def test_saves_by_ranks_know_the_digests_of_one_process(how: str, tmp_path: Path) -> None:
    """By both dimensions on four ranks, the manifest has what one process's file has by reading."""
    torch.save(full_state(), tmp_path / "whole.pt")
    run_ranks(4, save_with_placements, str(tmp_path / "ranks"), how)
    assert known(tmp_path / "ranks") == told(tmp_path / "whole.pt")
    assert known(tmp_path / "ranks") == told(tmp_path / "ranks", recompute=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("how", ["0", "1", "copy"])
def test_any_number_of_ranks_and_any_placement_is_the_same(how: str, world: int, tmp_path: Path) -> None:
    """Shards of unequal size, empty ones, replicas of which one is stored, split or not."""
    torch.save(full_state(), tmp_path / "whole.pt")
    run_ranks(world, save_with_placements, str(tmp_path / "ranks"), how)
    assert known(tmp_path / "ranks") == told(tmp_path / "whole.pt")


class Block(nn.Module):
    """What tensor parallelism cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)


def save_fsdp_and_tp(rank: int, world: int, folder: str) -> None:
    """A 2D mesh: sharded twice along one dimension, and by both."""
    torch.manual_seed(3)
    model, mesh = Block(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = get_model_state_dict(model)
    dcp.save({"model": state}, storage_writer=writer(folder))
    full = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
    if rank == 0:
        torch.save({"model": full}, f"{folder}.pt")


def test_fsdp2_with_tensor_parallelism_knows_the_digests_of_the_whole(tmp_path: Path) -> None:
    """Strided shards of real modules, on four ranks."""
    run_ranks(4, save_fsdp_and_tp, str(tmp_path / "two"))
    assert known(tmp_path / "two") == told(tmp_path / "two.pt")


def test_formats_and_options_of_writers_do_not_show(tmp_path: Path) -> None:
    """torch.save, safetensors, several files, payloads without containers, in the background: one digest."""
    state = {name: tensor for name, tensor in full_state().items() if name != "complex"}
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    expected = known(tmp_path / "one")
    torch.save(state, tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    for name in ("x.pt", "x.safetensors"):
        assert told(tmp_path / name) == expected
    options: list[dict[str, Any]] = [
        {"thread_count": 3, "sync_files": False},
        {"single_file_per_rank": False},
        {"torch_compatible": False},
    ]
    for number, option in enumerate(options):
        dcp.save(state, storage_writer=writer(tmp_path / str(number), **option))
        assert known(tmp_path / str(number)) == expected
    dcp.save(state, checkpoint_id=tmp_path / "off")
    off = digests(str(tmp_path / "off"))
    assert all(tensor.is_read for tensor in off.tensors if tensor.fqn != "empty")
    assert told(tmp_path / "off") == expected
    dcp.async_save(state, storage_writer=writer(tmp_path / "later")).result()
    assert known(tmp_path / "later") == expected


def test_every_dtype_strides_ties_and_parts_of_memory(tmp_path: Path) -> None:
    """Transposed, expanded, narrowed, tied and conjugate tensors, each dtype: as their copies have."""
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    state: State = {
        "turned": base.t(),
        "part": base[3:17, 5:21],
        "wide": torch.randn(1, 40).expand(9, 40),
        "tied": base,
        "again": base,
        "conjugate": torch.randn(5, 7, dtype=torch.complex64).conj(),
        "many": {str(number): torch.full((number % 3 + 1,), number) for number in range(40)},
    }
    for name in BY_NAME:
        dtype = getattr(torch, name, None)
        if dtype is not None and name not in (
            "float4_e2m1fn_x2",
            "bits1x8",
            "bits2x4",
            "bits4x2",
            "bits8",
            "bits16",
        ):
            state[f"of_{name}"] = (base > 70) if name == "bool" else base.to(dtype)
    state["of_float4_e2m1fn_x2"] = (base.to(torch.uint8)).view(torch.float4_e2m1fn_x2)
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    found = known(tmp_path / "one")
    assert found == told(tmp_path / "one", recompute=True)
    assert found["tied"] == found["again"]
    copies = {
        name: tensor.resolve_conj().contiguous().clone()
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and "float4" not in name
    }
    torch.save(copies, tmp_path / "copies.pt")
    assert told(tmp_path / "copies.pt") == {name: found[name] for name in copies}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunks_have_the_digest_of_the_whole(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Grids of chunks in any number of dimensions, read in tiles."""
    shape = tuple(data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
    tensor = torch.randint(0, 250, shape).to(dtype)
    cuts = [data.draw(st.integers(1, min(3, size))) for size in shape]
    folder = tmp_path_factory.mktemp("chunks")
    save_sharded(folder / "cut", {"x": tensor}, {"x": grid(shape, cuts)})
    torch.save({"x": tensor}, folder / "whole.pt")
    assert told(folder / "cut") == told(folder / "whole.pt")


def test_a_changed_bit_row_or_shape_is_another_digest(tmp_path: Path) -> None:
    """One bit, two rows changed for each other, another shape or dtype of the same bytes."""
    weight = torch.randn(64, 40)
    flipped, swapped = weight.clone(), weight.clone()
    flipped.view(torch.int32)[63, 39] ^= 1
    swapped[[3, 50]] = swapped[[50, 3]]
    others = {
        "flipped": flipped,
        "swapped": swapped,
        "shape": weight.reshape(40, 64),
        "dtype": weight.view(torch.int32),
    }
    dcp.save({"weight": weight, **others}, storage_writer=writer(tmp_path / "one"))
    assert len({*known(tmp_path / "one").values()}) == 5


def test_ranks_that_save_alone_say_nothing_of_what_they_have_in_part(tmp_path: Path) -> None:
    """Their manifests have digests of whole tensors only, and together none: by reading they are right."""
    run_ranks(2, save_alone, str(tmp_path / "one"))
    torch.save(full_state(), tmp_path / "whole.pt")
    found = digests(str(tmp_path / "one"))
    assert all(tensor.is_read for tensor in found.tensors if tensor.fqn != "empty")
    assert {tensor.fqn: tensor.digest for tensor in found.tensors} == told(tmp_path / "whole.pt")


def save_alone(rank: int, world: int, folder: str) -> None:
    """Each rank its own part."""
    mesh = init_device_mesh("cpu", (world,))
    state = {
        name: distribute_tensor(full, mesh, [Shard(0)]) if full.ndim >= 2 else full
        for name, full in full_state().items()
    }
    dcp.save(state, storage_writer=writer(folder), use_collectives=False)


def test_the_command_prints_names_and_json(tmp_path: Path) -> None:
    """A line a tensor, one for all; names select; what matches nothing is an error."""
    dcp.save(
        {"model": {"a": torch.ones(3), "b": torch.ones(3)}, "step": 1},
        storage_writer=writer(tmp_path / "one"),
    )
    run = CliRunner()
    shown = run.invoke(app, ["digest", str(tmp_path / "one")])
    assert shown.exit_code == 0 and shown.stdout.count(known(tmp_path / "one")["model.a"]) == 2
    answer = json.loads(
        run.invoke(app, ["digest", str(tmp_path / "one"), "model.a", "--recompute", "--json"]).stdout
    )
    assert [tensor["fqn"] for tensor in answer["tensors"]] == ["model.a"]
    assert answer["tensors"][0]["is_read"] and answer["bytes_read"] == 12
    assert run.invoke(app, ["digest", str(tmp_path / "one"), "nothing"]).exit_code == 3


def test_diff_is_told_by_digests_alone(tmp_path: Path) -> None:
    """Sharded by rows here, by columns there, no checksum compares: nothing is read for what is equal."""
    run_ranks(2, save_with_placements, str(tmp_path / "a"), "0")
    run_ranks(2, save_with_placements, str(tmp_path / "b"), "1")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.is_empty and found.bytes_read == 0
    assert len(found.equal) == len(full_state())
    told_only = diff(tmp_path / "a", tmp_path / "b", values=False)
    assert told_only.is_empty


def test_conversions_keep_digests_of_what_they_do_not_change(tmp_path: Path) -> None:
    """Renamed and chosen tensors keep theirs, those of cast ones and of what a map makes are computed;
    verified against the source by reading."""
    state = {"a": torch.randn(30, 40), "b": torch.randn(7), "c": torch.arange(9)}
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    names = known(tmp_path / "one")
    dcp.convert(tmp_path / "one", tmp_path / "two", to="dcp", rename={"^a$": "x"}, exclude="c")
    assert known(tmp_path / "two") == {"x": names["a"], "b": names["b"]}
    dcp.convert(tmp_path / "one", tmp_path / "cast", to="dcp", dtype={"a": "bfloat16"})
    index = dcp.open_index(tmp_path / "cast")
    assert [index.digest(row) for row in range(1, 3)] == [names["b"], names["c"]]
    assert index.digest(0) == told(tmp_path / "cast", only="a", recompute=True)["a"] != names["a"]
    dcp.convert(
        tmp_path / "one", tmp_path / "mapped", to="dcp", map=HALVES, only="a", chunks="split", files=2
    )
    assert known(tmp_path / "mapped") == told(tmp_path / "mapped", recompute=True)
    assert known(tmp_path / "mapped").keys() == {"top", "low"}
    assert verify(tmp_path / "mapped").findings == []
    dcp.save(state, checkpoint_id=tmp_path / "plain")
    dcp.convert(tmp_path / "plain", tmp_path / "none", to="dcp", map=HALVES, only="a")
    assert not any(dcp.open_index(tmp_path / "none").digests)
    dcp.convert(tmp_path / "one", tmp_path / "x.safetensors", to="safetensors")
    run = CliRunner()
    same = run.invoke(app, ["verify", str(tmp_path / "x.safetensors"), "--against", str(tmp_path / "one")])
    assert same.exit_code == 0, same.stdout
    other = run.invoke(app, ["verify", str(tmp_path / "cast"), "--against", str(tmp_path / "one")])
    assert other.exit_code == 1 and "'a' is another one" in other.stdout and "'b'" not in other.stdout
    lacking = run.invoke(app, ["verify", str(tmp_path / "two"), "--against", str(tmp_path / "one"), "--json"])
    kinds = {(found["kind"], found["fqn"]) for found in json.loads(lacking.stdout)[0]["findings"]}
    assert lacking.exit_code == 1 and kinds == {("digest", "a"), ("digest", "x"), ("digest", "c")}
    dcp.convert(tmp_path / "one", tmp_path / "y.safetensors", to="safetensors", only=["a", "b"])
    part = ["verify", str(tmp_path / "y.safetensors"), "--against", str(tmp_path / "one")]
    assert run.invoke(app, part).exit_code == 1
    assert run.invoke(app, [*part, "--only", "a", "--only", "b"]).exit_code == 0
    assert run.invoke(app, [*part, "--only", "a"]).exit_code == 1
    assert run.invoke(app, ["verify", str(tmp_path / "one"), "--only", "a"]).exit_code > 1


def test_digests_of_another_number_than_tensors_are_refused(tmp_path: Path) -> None:
    """A manifest whose digests are not those of its tensors is inconsistent."""
    dcp.save({"a": torch.ones(3), "b": torch.ones(2)}, storage_writer=writer(tmp_path / "one"))
    index = dcp.open_index(tmp_path / "one")
    assert [len(one) for one in index.digests] == [16, 16]
    for wrong in ([index.digests[0]], [index.digests[0], b"short"]):
        with pytest.raises(CheckpointFormatError, match="digests"):
            encode_manifest(replace(index, digests=wrong))


def test_a_manifest_that_tells_another_digest_is_found_out(tmp_path: Path) -> None:
    """Its own checksum and all bytes are right: what it says of one tensor is not, and verify names that.

    Where it tells nothing nothing is wrong."""
    state = {"a": torch.randn(30, 7), "empty": torch.zeros(0, 3), "scalar": torch.tensor(-0.0)}
    dcp.save(state, storage_writer=writer(tmp_path))
    assert verify(tmp_path).findings == []
    index = dcp.open_index(tmp_path)
    for fqn in state:
        sums = [*index.digests]
        sums[index.position[fqn]] = b"\x01" * 16
        (tmp_path / MANIFEST_NAME).write_bytes(encode_manifest(replace(index, digests=sums)))
        assert [(found.kind, found.fqn) for found in verify(tmp_path).faults] == [("digest", fqn)]
    assert CliRunner().invoke(app, ["verify", str(tmp_path)]).exit_code == 1
    (tmp_path / MANIFEST_NAME).write_bytes(
        encode_manifest(replace(index, digests=[b"", b"", index.digests[2]]))
    )
    assert verify(tmp_path).findings == []


def cut_in_both_ways(rank: int, world: int, folder: str) -> None:
    """One sharded by rows, one by columns, one that is larger than a block of checksums."""
    mesh = init_device_mesh("cpu", (world,))
    made = torch.Generator().manual_seed(1)
    state = {
        "rows": distribute_tensor(torch.randn(33, 5, generator=made), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(33, 5, generator=made), mesh, [Shard(1)]),
        "large": distribute_tensor(torch.randn(1201, 1003, generator=made), mesh, [Shard(0)]),
        "empty": torch.zeros(0, 3),
    }
    state["tied"] = state["again"] = torch.arange(40)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, digests=True))


def streamed(place: Path) -> dict[str, bytes]:
    """What a verification knows of digests once it has compared all checksums."""
    store = PosixStore(place)
    index = index_at(SourcePlace(store))
    report, sums = VerifyReport(str(place)), StreamedSums(index)
    PayloadChecks(store, index, {file.name: file for file in store.list()}, report, None, sums).run(2)
    assert report.ok
    return {index.fqns[row]: total for row, total in sums.sums.items()}


def test_a_verification_has_digests_from_what_it_reads_anyway(tmp_path: Path) -> None:
    """Rows of several ranks, blocks in whatever order, and another format; those that are cut across their
    rows or share their bytes are left for a second reading."""
    folder = tmp_path / "one"
    run_ranks(2, cut_in_both_ways, str(folder))
    index = dcp.open_index(folder)
    names = ("rows", "large", "empty")
    expected = {name: index.digests[index.position[name]] for name in names}
    assert streamed(folder) == expected
    assert verify(folder).findings == []
    dcp.convert(folder, tmp_path / "two", to="safetensors")
    found = streamed(tmp_path / "two")
    assert {name: found[name] for name in names} == expected and len(found) == 6


def test_elements_that_are_stored_once_are_not_read_for_ever(tmp_path: Path) -> None:
    """An element that is expanded to gigabytes is verified in no time, and has no digest; one that is tied
    has one."""
    torch.save({"x": torch.zeros(1).expand(1 << 30)}, tmp_path / "wide.pt")
    found = verify_place(locate(str(tmp_path / "wide.pt")), with_digest=True)
    assert found.ok and found.digest is None
    tied = torch.arange(40)
    torch.save({"x": tied, "y": tied}, tmp_path / "tied.pt")
    found = verify_place(locate(str(tmp_path / "tied.pt")), with_digest=True)
    assert found.digest == digests(str(tmp_path / "tied.pt")).digest


@pytest.mark.parametrize("with_digest", [False, True])
def test_a_part_that_is_nowhere_is_a_finding(tmp_path: Path, with_digest: bool) -> None:
    """Of a checkpoint of stock torch, whose metadata says that there is more of a tensor."""
    stock_save({"w": torch.arange(10.0)}, checkpoint_id=tmp_path / "one", no_dist=True)
    metadata = tmp_path / "one" / ".metadata"
    told = pickle.loads(metadata.read_bytes())
    told.state_dict_metadata["w"].size = torch.Size([20])
    metadata.write_bytes(pickle.dumps(told))
    found = verify_place(locate(str(tmp_path / "one")), with_digest=with_digest)
    assert [(one.kind, one.fqn) for one in found.faults] == [("index", "w")] and found.digest is None


def test_sums_of_checkpoints_have_none_and_what_is_left_keeps_its_own(tmp_path: Path) -> None:
    """A merge drops digests, also of one checkpoint times 0.5; weights keep theirs without the optimizer."""
    state = {"model": {"a": torch.randn(8, 3)}, "optimizer": {"exp_avg": torch.randn(8, 3)}, "step": 3}
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    names = known(tmp_path / "one")
    dcp.merge([tmp_path / "one"], tmp_path / "half", weights=[0.5])
    assert not any(dcp.open_index(tmp_path / "half").digests)
    assert told(tmp_path / "half", only="model")["model.a"] != names["model.a"]
    left = without(dcp.open_index(tmp_path / "one"), {"optimizer.exp_avg"})
    assert left.fqns == ["model.a"] and left.digest(0) == names["model.a"]


@pytest.mark.parametrize(
    "hostile",
    [
        5,
        [],
        {},
        [[2, None, 16, 0, 0, b""], [1 << 40, 0, b""]],
        [[3, None, 16, 0, 0, b""], [48, 0, b"x" * 48]],
    ],
)
def test_a_hostile_section_of_digests_is_refused(hostile: Any, tmp_path: Path) -> None:
    """Of another type, of a size that it has not, of more tensors than there are: a typed error."""
    dcp.save({"a": torch.ones(3), "b": torch.ones(2)}, storage_writer=writer(tmp_path / "one"))
    fields = msgpack.unpackb((tmp_path / "one" / "manifest.msgpack").read_bytes())
    fields["tensors"]["digests"] = hostile
    del fields["crc32"]
    body = bytes([0xDE, *(len(fields) + 1).to_bytes(2, "big")])
    body += b"".join(msgpack.packb(part) for item in fields.items() for part in item) + b"\xa5crc32\xce"
    with pytest.raises(CheckpointFormatError):
        decode_manifest(body + zlib.crc32(body).to_bytes(4, "big"))
