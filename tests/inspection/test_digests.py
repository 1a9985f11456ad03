"""Digests of tensors: equal for any ranks, sharding and format, and computed by a save or by reading."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import dcp
from tests.command_line.cli_support import run
from tests.support.ranks import run_ranks

State = dict[str, Any]


def full_state() -> State:
    """Return tensors with rows, columns and items at all alignments to blocks of 16 bytes."""
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


def digests(place: Path, *arguments: str) -> Any:
    """Return the report of the command."""
    ran = run("digest", place, *arguments, "--json")
    assert ran.status == 0, ran.err
    return ran.json


def by_name(place: Path, *arguments: str) -> dict[str, str]:
    """Return digests by name."""
    return {tensor["fqn"]: tensor["digest"] for tensor in digests(place, *arguments)["tensors"]}


def known(place: Path) -> dict[str, str]:
    """Return digests by name, and assert that all are from the manifest."""
    found = digests(place)
    assert found["bytes_read"] == 0 and not any(tensor["is_read"] for tensor in found["tensors"])
    return by_name(place)


def are_read(place: Path) -> bool:
    """Return whether the manifest has no digest of any tensor."""
    return all(tensor["is_read"] for tensor in digests(place)["tensors"] if tensor["fqn"] != "empty")


def writer(place: Path | str, **options: Any) -> dcp.FileSystemWriter:
    """Return a writer that computes digests."""
    return dcp.FileSystemWriter(place, digests=True, **options)


def save_with_placements(rank: int, world: int, folder: str, how: str) -> None:
    """Save `full_state` with one placement on all ranks; "grid" is a mesh of two dimensions."""
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


@pytest.mark.parametrize(
    ("how", "world"),
    [
        ("grid", 4),
        *(
            pytest.param(how, world, marks=pytest.mark.exhaustive)
            for how in ("0", "1", "copy")
            for world in (2, 3, 4)
        ),
    ],
)
def test_saves_by_ranks_know_the_digests_of_one_process(how: str, world: int, tmp_path: Path) -> None:
    """Digests of unequal and empty shards and of replicas equal those of one process's file."""
    torch.save(full_state(), tmp_path / "whole.pt")
    run_ranks(world, save_with_placements, str(tmp_path / "ranks"), how)
    assert known(tmp_path / "ranks") == by_name(tmp_path / "whole.pt")
    assert known(tmp_path / "ranks") == by_name(tmp_path / "ranks", "--recompute")


def test_digests_are_equal_for_all_writers(tmp_path: Path) -> None:
    """torch.save, safetensors, several files, bare payloads and async_save give equal digests."""
    state = {name: tensor for name, tensor in full_state().items() if name != "complex"}
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    expected = known(tmp_path / "one")
    torch.save(state, tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    for name in ("x.pt", "x.safetensors"):
        assert by_name(tmp_path / name) == expected
    options: list[State] = [
        {"thread_count": 3, "sync_files": False},
        {"single_file_per_rank": False},
        {"torch_compatible": False},
    ]
    for number, option in enumerate(options):
        dcp.save(state, storage_writer=writer(tmp_path / str(number), **option))
        assert known(tmp_path / str(number)) == expected
    dcp.save(state, checkpoint_id=tmp_path / "off")
    assert are_read(tmp_path / "off") and by_name(tmp_path / "off") == expected
    dcp.async_save(state, storage_writer=writer(tmp_path / "later")).result()
    assert known(tmp_path / "later") == expected


DTYPES = "float64 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz int8 int16 int32 int64 uint16"
DTYPES += " uint64 bool complex64 complex128"


def test_digests_of_views_equal_those_of_copies(tmp_path: Path) -> None:
    """Transposed, expanded, narrowed, tied and conjugate tensors of all dtypes have their copies' digests."""
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    state: State = {
        "turned": base.t(),
        "part": base[3:17, 5:21],
        "wide": torch.randn(1, 40).expand(9, 40),
        "tied": base,
        "again": base,
        "conjugate": torch.randn(5, 7, dtype=torch.complex64).conj(),
        **{f"of_{name}": (base % 7).to(getattr(torch, name)) for name in DTYPES.split()},
    }
    bits = base.to(torch.uint8).view(torch.float4_e2m1fn_x2)
    dcp.save({**state, "bits": bits}, storage_writer=writer(tmp_path / "one"))
    found = known(tmp_path / "one")
    assert found == by_name(tmp_path / "one", "--recompute")
    assert found["tied"] == found["again"]
    copies = {name: tensor.resolve_conj().contiguous().clone() for name, tensor in state.items()}
    torch.save(copies, tmp_path / "copies.pt")
    assert by_name(tmp_path / "copies.pt") == {name: found[name] for name in copies}


def test_a_change_of_bits_shape_or_name_changes_digests(tmp_path: Path) -> None:
    """One bit, two swapped rows, another shape or dtype of the same bytes change a tensor's digest; other
    names change the digest of the checkpoint."""
    weight = torch.randn(64, 40)
    flipped, swapped = weight.clone(), weight.clone()
    flipped.view(torch.int32)[63, 39] ^= 1
    swapped[[3, 50]] = swapped[[50, 3]]
    others = {"flipped": flipped, "swapped": swapped, "shape": weight.reshape(40, 64)}
    state = {"weight": weight, **others, "dtype": weight.view(torch.int32)}
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    assert len({*known(tmp_path / "one").values()}) == 5
    dcp.save({name.upper(): one for name, one in state.items()}, storage_writer=writer(tmp_path / "two"))
    assert [*known(tmp_path / "one").values()] == [*known(tmp_path / "two").values()]
    assert digests(tmp_path / "one")["digest"] != digests(tmp_path / "two")["digest"]


HALVES = {"rules": [{"from": {"a": "(x + y) c"}, "to": {"top": "x c", "low": "c y"}, "sizes": {"x": 13}}]}
"""A map that splits the rows of one tensor, and transposes the second part."""


def test_conversions_keep_digests_of_unchanged_tensors(tmp_path: Path) -> None:
    """Renamed and selected tensors keep digests, cast and mapped tensors get new ones, a merge has none."""
    state = {"a": torch.randn(30, 40), "b": torch.randn(7), "c": torch.arange(9)}
    dcp.save(state, storage_writer=writer(tmp_path / "one"))
    names = known(tmp_path / "one")
    dcp.convert(tmp_path / "one", tmp_path / "two", to="dcp", rename={"^a$": "x"}, exclude="c")
    assert known(tmp_path / "two") == {"x": names["a"], "b": names["b"]}
    dcp.convert(tmp_path / "one", tmp_path / "cast", to="dcp", dtype={"a": "bfloat16"})
    cast = known(tmp_path / "cast")
    assert cast == by_name(tmp_path / "cast", "--recompute")
    assert cast | {"a": names["a"]} == names and cast["a"] != names["a"]
    options: State = {"map": HALVES, "only": "a"}
    dcp.convert(tmp_path / "one", tmp_path / "mapped", to="dcp", chunks="split", files=2, **options)
    assert known(tmp_path / "mapped") == by_name(tmp_path / "mapped", "--recompute")
    assert known(tmp_path / "mapped").keys() == {"top", "low"}
    assert run("verify", tmp_path / "mapped").status == 0
    dcp.save(state, checkpoint_id=tmp_path / "plain")
    dcp.convert(tmp_path / "plain", tmp_path / "none", to="dcp", **options)
    dcp.merge([tmp_path / "one"], tmp_path / "half", weights=[0.5])
    assert are_read(tmp_path / "none") and are_read(tmp_path / "half")
    assert by_name(tmp_path / "half")["b"] != names["b"]


def test_verify_against_another_compares_by_digests(tmp_path: Path) -> None:
    """Equal tensors pass; other values, missing and additional names are findings; --only selects tensors."""
    state = {"a": torch.randn(30, 40), "b": torch.randn(7), "c": torch.arange(9)}
    one = tmp_path / "one"
    dcp.save(state, storage_writer=writer(one))
    dcp.convert(one, tmp_path / "x.safetensors", to="safetensors")
    dcp.convert(one, tmp_path / "cast", to="dcp", dtype={"a": "bfloat16"})
    dcp.convert(one, tmp_path / "two", to="dcp", rename={"^a$": "x"}, exclude="c")
    dcp.convert(one, tmp_path / "y.safetensors", to="safetensors", only=["a", "b"])
    assert run("verify", tmp_path / "x.safetensors", "--against", one).status == 0
    other = run("verify", tmp_path / "cast", "--against", one)
    assert other.status == 1 and "'a' differs from" in other.out and "'b'" not in other.out
    lacking = run("verify", tmp_path / "two", "--against", one, "--json")
    kinds = {(found["kind"], found["fqn"]) for found in lacking.json[0]["findings"]}
    assert lacking.status == 1 and kinds == {("digest", "a"), ("digest", "x"), ("digest", "c")}
    part = ("verify", tmp_path / "y.safetensors", "--against", one)
    assert run(*part).status == 1
    assert run(*part, "--only", "a", "--only", "b").status == 0
    assert run(*part, "--only", "a").status == 1
    assert run("verify", one, "--only", "a").status > 1


def sealed(body: bytes) -> bytes:
    """Return a manifest with a valid checksum."""
    return body + zlib.crc32(body).to_bytes(4, "big")


@pytest.mark.parametrize("fqn", ["a", "empty", "scalar"])
def test_verify_finds_a_wrong_digest_in_a_manifest(tmp_path: Path, fqn: str) -> None:
    """verify names the tensor of a wrong digest in a manifest with a valid checksum and undamaged data."""
    state = {"a": torch.randn(30, 7), "empty": torch.zeros(0, 3), "scalar": torch.tensor(-0.0)}
    dcp.save(state, storage_writer=writer(tmp_path))
    assert run("verify", tmp_path).status == 0
    index, manifest = dcp.open_index(tmp_path), (tmp_path / "manifest.msgpack").read_bytes()
    sums = b"".join(index.digests)
    assert manifest.count(sums) == 1
    row = index.position[fqn]
    other = sums[: 16 * row] + b"\x01" * 16 + sums[16 * row + 16 :]
    (tmp_path / "manifest.msgpack").write_bytes(sealed(manifest.replace(sums, other)[:-4]))
    ran = run("verify", tmp_path, "--json")
    assert [(found["kind"], found["fqn"]) for found in ran.json[0]["findings"]] == [("digest", fqn)]
    assert ran.status == 1
