"""Seeded fuzzing of everything that parses bytes: a typed error or a valid value, in bounded resources."""

from __future__ import annotations

import io
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dcp.storage.errors import CheckpointError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.native.record import begin_record, locate_payload
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.formats.safetensors.file import parse_header
from tests.support.crashes import in_lab
from tests.support.formats_indexes import small_index

ROUNDS = 6_000
EXHAUSTIVE_ROUNDS = 100_000
SLOWEST_SECONDS = 10.0

Parse = Callable[[bytes], Any]


def parse_plain(data: bytes) -> Any:
    """A value of plain data can be encoded again."""
    value = decode_plain(data)
    assert encode_plain(value, limit_bytes=1 << 20) is not None
    return value


def parse_sealed_manifest(body: bytes) -> Any:
    """The manifest's decoder behind its checksum, which would stop nearly all of the damage."""
    sealed = body + b"\xa5crc32\xce"
    index = decode_manifest(sealed + crc32(sealed).to_bytes(4, "big"))
    index.check()
    return index


def parse_record(data: bytes) -> Any:
    """A payload located in a zip lies in the record; a safetensors blob may go on behind it."""
    stored = locate_payload(lambda at, count: data[at : at + count], 0, len(data), fqn="a")
    assert stored.payload_offset >= 0
    if data.startswith(b"PK"):
        assert stored.payload_offset + stored.payload_bytes <= len(data)
    return stored


def parse_safetensors(data: bytes) -> Any:
    """Entries of a header fill the file."""
    header = parse_header(lambda at, count: data[at : at + count], len(data))
    assert all(0 <= entry.begin <= entry.end <= len(data) for entry in header.entries.values())
    return header


def seeds() -> dict[str, tuple[Parse, list[bytes]]]:
    """Valid inputs of each parser."""
    stream = io.BytesIO()
    torch.save(torch.arange(300.0).reshape(3, 100), stream)
    opened = begin_record(4, (2, 3), 12, 0)
    ours = opened.prefix + bytes(12) + opened.suffix(crc32(bytes(12)))
    tensors = save({"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}, {"k": "v"})
    manifest = encode_manifest(small_index())
    values: list[Any] = [
        {"lr": 0.001, "betas": (0.9, 0.999), "names": ["a", b"b", None], 3: {True: 2**70, (1,): 1j}},
        [(((1,),),), "x" * 300, list(range(50))],
    ]
    return {
        "plain": (parse_plain, [encode_plain(value) or b"" for value in values]),
        "manifest": (decode_manifest, [manifest]),
        "sealed manifest": (parse_sealed_manifest, [manifest[: -len(b"\xa5crc32\xce") - 4]]),
        "record": (parse_record, [stream.getvalue(), ours]),
        "safetensors": (parse_safetensors, [tensors]),
        "blob": (parse_record, [tensors]),
    }


def mutants(data: bytes, random_: random.Random) -> Iterator[bytes]:
    """Endless damage: bits, bytes, magic numbers, cuts, insertions, repetitions, copies from elsewhere."""
    magic = [b"\0", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0" * 8]
    magic += [b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"PK\5\6", b"9" * 30, b"\xcf" + b"\xff" * 8]
    while True:
        mutant = bytearray(data)
        for _ in range(random_.choice([1, 1, 1, 2, 5])):
            at = random_.randrange(len(mutant) + 1)
            match random_.randrange(7):
                case 0 if at < len(mutant):
                    mutant[at] ^= 1 << random_.randrange(8)
                case 1 if at < len(mutant):
                    mutant[at] = random_.randrange(256)
                case 2:
                    piece = random_.choice(magic)
                    mutant[at : at + len(piece)] = piece
                case 3:
                    del mutant[at : at + random_.choice([1, 4, len(mutant)])]
                case 4:
                    mutant[at:at] = random_.choice(magic)
                case 5:
                    mutant[at:at] = mutant[at : at + 20] * random_.choice([1, 2, 100])
                case _:
                    source = random_.randrange(len(mutant) + 1)
                    mutant[at : at + 8] = mutant[source : source + 8]
        yield bytes(mutant)


def fuzz(name: str, rounds: int, seed: int) -> int:
    """Runs one parser over mutants; returns how many it accepted."""
    parse, originals = seeds()[name]
    accepted = 0
    for number, original in enumerate(originals):
        parse(original)
        stream = mutants(original, random.Random(f"{name} {number} {seed}"))
        for _ in range(rounds // len(originals)):
            mutant = next(stream)
            begun = time.thread_time()
            try:
                parse(mutant)
                accepted += 1
            except CheckpointError:
                pass
            seconds = time.thread_time() - begun
            assert seconds < SLOWEST_SECONDS, f"{seconds} seconds for {mutant!r}"
    return accepted


@pytest.mark.parametrize("name", seeds())
def test_damaged_input_gives_a_typed_error_or_a_valid_value(name: str) -> None:
    """Over mutations of valid inputs nothing but `CheckpointError` is raised, and quickly."""
    accepted = fuzz(name, ROUNDS, seed=1)
    assert accepted < ROUNDS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", seeds())
@pytest.mark.parametrize("seed", [2, 3])
def test_damaged_input_exhaustively(name: str, seed: int) -> None:
    """The same, for some minutes."""
    fuzz(name, EXHAUSTIVE_ROUNDS, seed)


def limited_fuzz(name: str, rounds: int) -> None:
    """In a process of its own, whose address space may grow by 512 MB over what its imports take."""
    fuzz(name, 20, 0)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20), resource.RLIM_INFINITY))
    fuzz(name, rounds, 7)


@pytest.mark.parametrize("name", ["sealed manifest", "record"])
def test_damaged_input_does_not_take_memory(name: str) -> None:
    """In a process with little memory to spare no mutant causes a MemoryError."""
    in_lab(limited_fuzz, name, ROUNDS // 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", seeds())
def test_damaged_input_does_not_take_memory_exhaustively(name: str) -> None:
    """The same for every parser, for longer."""
    in_lab(limited_fuzz, name, EXHAUSTIVE_ROUNDS // 5)


def test_a_header_of_a_hundred_megabytes_is_bounded() -> None:
    """A safetensors header as long as the cap allows is not read unless the file is that long."""
    read: list[int] = []

    def reader(at: int, count: int) -> bytes:
        read.append(count)
        return (99_999_999).to_bytes(8, "little")[:count] if at == 0 else b"{}"

    with pytest.raises(CheckpointError):
        parse_header(reader, 1000)
    assert sum(read) == 8
    with pytest.raises(CheckpointError):
        parse_header(reader, None)


def test_deeply_nested_json_is_refused() -> None:
    """The JSON parser's recursion limit becomes the typed error."""
    text = ("[" * 200_000).encode()
    data = (len(text) + 5).to_bytes(8, "little") + b'{"a":' + text
    with pytest.raises(CheckpointError):
        parse_safetensors(data)
