"""Digests and checksums. Internal: pure; compared with docs/reference/format.md and zlib."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import hashlib
import io
import itertools
import pathlib
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp import DefaultSavePlanner
from dcp.planners.by_value import encode_by_value
from dcp.planners.value_digests import (
    NOT_COMPARABLE,
    SAMPLE_BYTES,
    WHOLE_LIMIT_BYTES,
    digest_tensors,
    digest_value,
)
from dcp.storage.digests import KEY, BoxDigest, logical_runs, power, product, shown_digest
from dcp.storage.formats.checksums import BLOCK_BYTES as CRC_BLOCK_BYTES
from dcp.storage.formats.checksums import crc32, crc32_combine
from tests.support.examples import examples

H = 0x66E94BD4EF8A2C3B884CFA59CA342B2E


def multiplied(x: int, y: int) -> int:
    """Multiply by algorithm 1 of NIST SP 800-38D."""
    z, v = 0, y
    for bit in range(127, -1, -1):
        if x >> bit & 1:
            z ^= v
        v = v >> 1 ^ (0xE1 << 120 if v & 1 else 0)
    return z


def sum_of(data: bytes) -> int:
    """Return the sum of a tensor's bytes, by section 10 of the document alone."""
    total = 0
    for begin in range(0, len(data), 16):
        total = multiplied(total ^ int.from_bytes(data[begin : begin + 16].ljust(16, b"\0"), "big"), H)
    return multiplied(total, H)


def added(array: np.ndarray[Any, Any], offsets: list[int], sizes: list[int], cuts: list[int]) -> int:
    """Return the contribution of a box of ``array``, read in pieces whose lengths cycle through ``cuts``."""
    place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    data, position = np.ascontiguousarray(array[place]).tobytes(), 0
    where = logical_runs(array.shape, tuple(offsets), tuple(sizes), array.itemsize)
    box, lengths = BoxDigest(where), itertools.cycle(cuts)
    while position < len(data):
        length = next(lengths)
        box.update(memoryview(data[position : position + length]))
        position += length
    return product(power(KEY, where.blocks_behind), box.value())


def random_array(shape: tuple[int, ...], itemsize: int, seed: int) -> np.ndarray[Any, Any]:
    """Return an array of random bytes."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    return data.view({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[itemsize]).reshape(shape)


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[list[int]], list[int]]:
    """Draw an array, the edges of a grid of boxes, and lengths of pieces."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    array = random_array(shape, draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.integers(0, 99)))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    return array, edges, draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))


@examples(150)
@given(cut_arrays())
def test_sums_of_boxes_add_up_to_the_whole(
    drawn: tuple[np.ndarray[Any, Any], list[list[int]], list[int]],
) -> None:
    """A grid of boxes in any number of dimensions, read piece by piece, has the documented sum."""
    array, edges, cuts = drawn
    total = 0
    for spans in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        total ^= added(array, [low for low, _ in spans], [high - low for low, high in spans], cuts)
    assert total == sum_of(array.tobytes())


def test_digests_depend_on_dtype_and_shape() -> None:
    """Equal bytes with another dtype or shape have another digest, and the document's example is right."""
    total = sum_of(bytes.fromhex("0000803f0040404080 40a040")).to_bytes(16, "big")
    forms = (("bfloat16", (2, 3)), ("float16", (2, 3)), ("bfloat16", (3, 2)), ("bfloat16", (6,)))
    shown = [shown_digest(total, dtype, shape) for dtype, shape in forms]
    encoded = b"dcphub tensor digest 1\nbfloat16\n2,3\n" + total
    text = (pathlib.Path(__file__).parents[2] / "docs/reference/format.md").read_text()
    assert len({*shown}) == 4 and shown[0] == hashlib.blake2b(encoded, digest_size=16).hexdigest()
    assert all(one in text for one in (total.hex(), shown[0], shown_digest(bytes(16), "float32", ())))


@given(
    first=st.binary(max_size=64),
    second=st.binary(max_size=64) | st.just(b"\x9d\x0a\xd9\x6d"),
    zeros=st.sampled_from([0, 1, 4096, CRC_BLOCK_BYTES - 4, CRC_BLOCK_BYTES, CRC_BLOCK_BYTES + 1]),
)
def test_checksums_of_two_pieces_combine(first: bytes, second: bytes, zeros: int) -> None:
    """The checksums of two pieces combine for any lengths, also for an empty piece, whose checksum is 0."""
    whole = second + bytes(zeros)
    assert crc32_combine(crc32(first), crc32(whole), len(whole)) == zlib.crc32(first + whole)


# -- digests of replicas -------------------------------------------------------------------------------------


def digest_tensor(tensor: torch.Tensor, check: Any = "sampled") -> int:
    """Return the digest of one tensor; 0 with ``off``."""
    return int(digest_tensors([tensor], check)[0])


@pytest.mark.parametrize("size", [WHOLE_LIMIT_BYTES, 1 << 20, (1 << 20) + 5])
def test_large_tensors_are_sampled_at_head_tail_and_between(size: int) -> None:
    """Small tensors are read whole; in large ones only the full check sees a byte between samples."""
    tensor, is_whole = torch.zeros(size, dtype=torch.uint8), size == WHOLE_LIMIT_BYTES
    sampled, full = digest_tensor(tensor), digest_tensor(tensor, "full")
    for place, is_seen in ((0, True), (-1, True), (-SAMPLE_BYTES, True), (SAMPLE_BYTES + 1, is_whole)):
        tensor[place] = 1
        assert digest_tensor(tensor, "full") != full
        assert (digest_tensor(tensor) != sampled) == is_seen, place
        tensor[place] = 0


@dataclasses.dataclass
class Position:
    epoch: int
    order: Any


Phase = enum.Enum("Phase", ["WARM", "COLD"])


class Thing:
    """A class without __eq__ that refers to itself, as modules refer to their parents."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.own = self


def made(number: int) -> dict[str, Any]:
    """Return a value of each kind; values are equal for equal ``number`` and different otherwise."""
    name = f"{number}" * 3
    return {
        "random state": np.random.RandomState(number).get_state(),
        "array": np.full((2, 3), number).T,
        "scalar": np.float32(number),
        "structure": np.array([(number, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "set": {name, "b", "c", "d"},
        "frozenset": frozenset((number, 9)),
        "deque": collections.deque([number]),
        "default dict": collections.defaultdict(list, {"a": [number]}),
        "ordered dict in a tuple": (collections.OrderedDict(a=number),),
        "dataclass": Position(1, [name, name]),
        "enum": list(Phase)[number],
        "tensor in a tuple": (torch.full((3,), float(number)),),
        "time": datetime.timedelta(number),
        "path": pathlib.Path(name),
        "size": torch.Size([number]),
        "dtype": [torch.float32, torch.float64][number],
        "bytearray": bytearray([number]),
        "buffer": io.BytesIO(bytes([number])),
        "generator": torch.Generator().manual_seed(number),
        "long string": "x" * (1 << 17) + name,
        "long list": [0.5] * (1 << 17) + [number],
        "type": [(1, {1}), (True, {1})][number],
        "sign of zero": ([-0.0] if number else [0.0], {1}),
        "numpy's generator": np.random.default_rng(number),
        "Python's generator": random.Random(number),
        "masked array": np.ma.masked_array([1, 2, 3], [False, False, bool(number)]),
        "array of objects": np.array([{"a": number}, None, name], object),
        "sparse tensor in a tuple": (torch.eye(3).to_sparse() * (number + 1),),
        "quantised tensor in a tuple": (
            torch.quantize_per_tensor(torch.ones(3), number + 1, 0, torch.quint8),
        ),
        "object": Thing([number]),
        "object without __dict__": (functools.partial(int, base=number + 2), argparse.Namespace(b=number)),
        "module": (torch.nn.LayerNorm(2 + number),),
    }


def digests_of(state: dict[str, Any]) -> dict[str, int]:
    """Return the digests that a save compares, by name."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    local = planner.create_local_columns(digests=False)
    objects = local.digested_objects("sampled")
    if not any(isinstance(value, torch.Generator) for value in state.values()):
        staged = local.encoded().digested_objects("sampled")
        assert staged.digests.tolist() == objects.digests.tolist()
    return dict(zip(objects.fqns, objects.digests.tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_only_equal_values_have_equal_digests() -> None:
    """Equal values made separately have one digest, also a deep copy that shares other parts."""
    one, again, other = (digests_of(made(number)) for number in (0, 0, 1))
    assert one == again
    assert not [name for name, digest in one.items() if digest in (0, NOT_COMPARABLE, other[name])]
    shared = Position(1, ["000"] * 2)
    assert digest_value(shared) == digest_value(copy.deepcopy(shared)) == digest_value(made(0)["dataclass"])
    assert digest_value({"b", "a"}) == digest_value({"a", "b"})


@pytest.mark.parametrize("value", [1, [1]])
def test_digests_ignore_the_order_of_keys(value: Any) -> None:
    """Dicts built from sets have a different order in each process; only an OrderedDict's order counts."""
    one, other = {"a": value, "b": 2}, {"b": 2, "a": value}
    kinds: list[Any] = [dict, functools.partial(collections.defaultdict, list), collections.Counter, Thing]
    for kind in kinds:
        assert digest_value([kind(one)]) == digest_value([kind(other)])
    ordered = [digest_value([collections.OrderedDict(each)]) for each in (one, other)]
    assert ordered[0] != ordered[1]


@pytest.mark.timeout(20)
def test_shared_containers_are_read_once() -> None:
    """A set reached by 2^60 paths is read once; rings and references to parents are not comparable."""
    held: Any = {1}
    for _ in range(60):
        held = [held, held]
    assert digest_value(held) != NOT_COMPARABLE
    root: dict[str, Any] = {"parent": None, "things": {1}}
    root["children"] = [{"parent": root, "children": []} for _ in range(3)]
    assert encode_by_value(root) is None
    assert digest_value(root) == NOT_COMPARABLE
    assert digest_value(argparse.Namespace(tree=root)) != NOT_COMPARABLE
    below: Any = argparse.Namespace(a=1)
    for _ in range(60):
        below = argparse.Namespace(a=below, b=below)
    assert digest_value(below) != NOT_COMPARABLE
    ring: list[Any] = [{1}]
    ring.append(ring)
    assert digest_value(ring) == NOT_COMPARABLE
