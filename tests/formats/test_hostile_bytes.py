"""Damaged and hostile files of each format: a typed error or a valid value, in bounded time and memory."""

from __future__ import annotations

import random
import resource
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import dcp
from dcp.errors import CheckpointError
from dcp.storage.stores import MemoryStore
from tests.support.crashes import in_lab
from tests.support.hostile_files import archive

ROUNDS = 500
EXHAUSTIVE_ROUNDS = 20_000
SLOWEST_SECONDS = 10.0
SEAL = b"\xa5crc32\xce"

STATE: dict[Any, Any] = {
    "m": {
        "w": torch.arange(6.0).view(2, 3),
        "t": torch.ones(4, 3).t(),
        "h": torch.ones(2, dtype=torch.bfloat16),
    },
    "lr": 0.001,
    "betas": (0.9, [None, True, "x" * 300, 2**70, b"y"]),
    5: {"a": {1: 1j}},
}


def resealed(data: bytes) -> bytes:
    """Return a manifest with a valid checksum; a wrong checksum would stop nearly all damage at once."""
    body = data if data.endswith(SEAL) else data + SEAL
    return body + zlib.crc32(body).to_bytes(4, "big")


def seeds(folder: Path) -> dict[str, tuple[str, bytes, Callable[[bytes], bytes]]]:
    """Return by kind a file of a checkpoint, the file's bytes, and a function to apply after the damage."""
    dcp.save(STATE, checkpoint_id=folder / "dcp", no_dist=True)
    stock.save({"w": torch.ones(3), "lr": [0.1, {"a": ()}]}, checkpoint_id=folder / "stock", no_dist=True)
    torch.save(STATE, folder / "m.pt")
    save_file({"a": torch.zeros(3), "b": torch.ones(2, 2)}, folder / "m.safetensors", metadata={"k": "v"})
    manifest = (folder / "dcp" / "manifest.msgpack").read_bytes()
    return {
        "manifest": ("manifest.msgpack", manifest, bytes),
        "sealed manifest": ("manifest.msgpack", manifest[:-4], resealed),
        "metadata": (".metadata", (folder / "stock" / ".metadata").read_bytes(), bytes),
        "torch file": ("m.pt", (folder / "m.pt").read_bytes(), bytes),
        "safetensors": ("m.safetensors", (folder / "m.safetensors").read_bytes(), bytes),
    }


def mutants(data: bytes, random_: random.Random) -> Iterator[bytes]:
    """Yield damaged copies endlessly: bits, bytes, magic numbers, cuts, insertions, repetitions, moved
    bytes."""
    magic = [b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0" * 8]
    magic += [b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"PK\5\6", b"9" * 30, b"R.", b"\x85\x81b"]
    while True:
        mutant = bytearray(data)
        for _ in range(random_.choice([1, 1, 1, 2, 5])):
            at = random_.randrange(len(mutant) + 1)
            piece = random_.choice(magic)
            match random_.randrange(6):
                case 0 if at < len(mutant):
                    mutant[at] ^= 1 << random_.randrange(8)
                case 1:
                    mutant[at : at + len(piece)] = piece
                case 2:
                    del mutant[at : at + random_.choice([1, 4, len(mutant)])]
                case 3:
                    mutant[at:at] = piece
                case 4:
                    mutant[at:at] = mutant[at : at + 20] * random_.choice([1, 2, 100])
                case _:
                    source = random_.randrange(len(mutant) + 1)
                    mutant[at : at + 8] = mutant[source : source + 8]
        yield bytes(mutant)


def fuzz(folder: Path, kind: str, rounds: int, seed: int) -> int:
    """Open damaged copies and read their values. Return the number accepted; an untyped error propagates."""
    name, original, finished = seeds(folder / kind)[kind]
    store, accepted = MemoryStore(f"fuzz-{kind}"), 0
    place = store.url if name in ("manifest.msgpack", ".metadata") else f"{store.url}/{name}"
    stream = mutants(original, random.Random(f"{kind} {seed}"))
    for _ in range(rounds):
        mutant = finished(next(stream))
        store.publish(name, mutant, durable=False)
        begun = time.thread_time()
        try:
            dcp.open_index(place).check()
            if place != store.url:
                dcp.read(place, no_dist=True)
            accepted += 1
        except CheckpointError:
            pass
        seconds = time.thread_time() - begun
        assert seconds < SLOWEST_SECONDS, f"{seconds} seconds for {mutant!r}"
    return accepted


def limited_fuzz(folder: Path, kind: str, rounds: int) -> int:
    """Fuzz with a limit on the address space: 512 MB more than the imports take."""
    fuzz(folder / "first", kind, 20, 0)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20), resource.RLIM_INFINITY))
    return fuzz(folder / "second", kind, rounds, 7)


KINDS = ("manifest", "sealed manifest", "metadata", "torch file", "safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_gives_a_typed_error_or_a_valid_value(tmp_path: Path, kind: str) -> None:
    """Mutations of valid files raise only `CheckpointError`, quickly and in little memory."""
    assert in_lab(limited_fuzz, tmp_path, kind, ROUNDS) < ROUNDS


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_exhaustively(tmp_path: Path, kind: str) -> None:
    """Repeat the test above for some minutes."""
    assert in_lab(limited_fuzz, tmp_path, kind, EXHAUSTIVE_ROUNDS) < EXHAUSTIVE_ROUNDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_found(tmp_path: Path, kind: str) -> None:
    """A file truncated at any byte is an error, and so is a manifest with bytes after the end."""
    name, data, _ = seeds(tmp_path)[kind]
    store = MemoryStore(f"cut-{kind}")
    place = store.url if name in ("manifest.msgpack", ".metadata") else f"{store.url}/{name}"
    ends = [data[:cut] for cut in [*range(0, len(data), 61), len(data) - 1]]
    for cut in [*ends, *([data + b"\0"] if kind == "manifest" else [])]:
        store.publish(name, cut, durable=False)
        with pytest.raises(CheckpointError):
            dcp.open_index(place)


CALLS = {
    "system": b"cposix\nsystem\n(X\x0e\0\0\0touch executedtR",
    "getattr": b"cbuiltins\ngetattr\n(K\x05X\x04\0\0\0realtR",
    "eval": b"c__builtin__\neval\n(X\x01\0\0\x001tR",
    "import": b"c__builtin__\n__import__\n(X\x02\0\0\0ostR",
    "nested name": b"\x8c\x0bcollections\x8c\x20OrderedDict.__init__.__globals__\x93",
    "instance": b"(X\x02\0\0\0osiposix\nsystem\n",
    "partial": b"cfunctools\npartial\n(cposix\nsystem\nX\x04\0\0\0truetR",
    "class of a value": b"coperator\nattrgetter\n(X\x09\0\0\0__class__tR",
}


@pytest.mark.parametrize("where", ["file", "metadata"])
@pytest.mark.parametrize("call", CALLS)
def test_calls_in_a_pickle_are_not_run(tmp_path: Path, call: str, where: str) -> None:
    """A pickle's call never runs. The index lists the refused entry with the name of the function."""
    pickled = b"\x80\x04}X\x01\0\0\0x" + CALLS[call] + b"s."
    if where == "metadata":
        (tmp_path / ".metadata").write_bytes(pickled)
        with pytest.raises(CheckpointError):
            dcp.open_index(tmp_path)
    else:
        (tmp_path / "m.pt").write_bytes(archive(pickled))
        try:
            refused = dcp.open_index(tmp_path / "m.pt").provenance.get("refused_objects", {})
        except CheckpointError:
            pass
        else:
            assert "x" in refused
        with pytest.raises(CheckpointError):
            dcp.load({"x": None}, checkpoint_id=tmp_path / "m.pt", no_dist=True)
    assert not list(tmp_path.glob("executed")) and not Path("executed").exists()
