"""Digests that replicas are compared by. Internal: pure; at the door they show as errors of saves alone."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import io
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dcp.planners.by_value import encode_by_value
from dcp.planners.digest import (
    SAMPLE_BYTES,
    WHOLE_LIMIT_BYTES,
    ReplicaCheck,
    block_sums,
    digest_bytes,
    digest_tensors,
)
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.value_digests import NOT_COMPARABLE, digest_value


def digest_tensor(tensor: torch.Tensor, check: ReplicaCheck = "sampled") -> int:
    """Digest of one tensor; 0 with ``off``."""
    return int(digest_tensors([tensor], check)[0])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("check", ["sampled", "full"])
@pytest.mark.parametrize("rows", [0, 3, 1000], ids=str)
def test_strides_do_not_change_a_digest(dtype: torch.dtype, check: str, rows: int) -> None:
    """The same values in another memory order have the same digest, small and large, sampled or whole."""
    tensor = (torch.arange(rows * 257).reshape(rows, 257) % 100).to(dtype)
    other = tensor.t().contiguous().t()
    assert other.is_contiguous() == (rows < 2)
    assert digest_tensor(tensor, check) == digest_tensor(other, check) != 0  # type: ignore[arg-type]


def test_small_tensors_are_read_whole() -> None:
    """Any changed element of a tensor up to the limit changes the digest."""
    tensor = torch.zeros(WHOLE_LIMIT_BYTES, dtype=torch.uint8)
    before = digest_tensor(tensor)
    for place in (0, 5000, 33333, WHOLE_LIMIT_BYTES - 1):
        tensor[place] = 1
        assert digest_tensor(tensor) != before
        tensor[place] = 0
    assert digest_tensor(tensor) == before


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 5])
def test_large_tensors_are_sampled_at_head_tail_and_between(size: int) -> None:
    """Changes at both ends are seen, a single byte between samples only by the full check."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    sampled, full = digest_tensor(tensor), digest_tensor(tensor, "full")
    for place, is_seen in ((0, True), (-1, True), (-SAMPLE_BYTES, True), (SAMPLE_BYTES + 1, False)):
        tensor[place] = 1
        assert digest_tensor(tensor, "full") != full
        assert (digest_tensor(tensor) != sampled) == is_seen, place
        tensor[place] = 0


@pytest.mark.parametrize(
    "digest", [lambda data: digest_tensor(data, "full"), block_sums], ids=["crc", "sums"]
)
def test_every_bit_counts(digest: Callable[[torch.Tensor], Any]) -> None:
    """Wherever it is, also where two differ in the highest bit of a word; and memory may begin anywhere."""
    memory = torch.randint(256, ((2 << 20) + 8,), dtype=torch.uint8)
    data = memory[3 : 3 + (2 << 20) + 5]
    before = torch.as_tensor(digest(data))
    assert torch.equal(torch.as_tensor(digest(data.clone())), before)
    for places in ((0,), ((1 << 20) - 1,), (1 << 20,), (-1,), (3, 7), (3, (64 << 10) + 3), (-2, -6)):
        changed = data.clone()
        changed[list(places)] ^= 0x80
        assert not torch.equal(torch.as_tensor(digest(changed)), before), places


def test_zero_is_reserved() -> None:
    """Nothing has digest 0 but what was not looked at."""
    assert digest_bytes(b"") != 0
    assert digest_tensor(torch.zeros(0)) == digest_bytes(b"")
    assert digest_tensors([torch.zeros(3)], "off").tolist() == [0]


@dataclasses.dataclass
class Position:
    """Of a loader."""

    epoch: int
    order: Any


@dataclasses.dataclass
class Cursor:
    """Of a loader, with a state that is none of its fields."""

    epoch: int

    def __post_init__(self) -> None:
        self.position = 0

    @functools.cached_property
    def name(self) -> str:
        """Known once somebody has asked."""
        return f"epoch {self.epoch}"


class Phase(enum.Enum):
    """Of training."""

    WARM = 1
    COLD = 2


class Thing:
    """Of a class that says nothing of equality; it knows itself, as modules know their parents."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.own = self


def made(number: int) -> dict[str, Any]:
    """One value of each kind; of another ``number`` another one, of the same an equal one."""
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
    """As a save compares them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    local = planner.create_local_columns(digests=False)
    objects = local.digested_objects("sampled")
    if not any(isinstance(value, torch.Generator) for value in state.values()):
        staged = local.encoded().digested_objects("sampled")
        assert staged.digests.tolist() == objects.digests.tolist()
    return dict(zip(objects.fqns, objects.digests.tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_equal_values_have_one_digest_and_others_another() -> None:
    """Equal ones are made apart, and one of them once more by a copy, which shares parts otherwise."""
    one, again, other = (digests_of(made(number)) for number in (0, 0, 1))
    assert one == again
    assert not [name for name, digest in one.items() if digest in (0, NOT_COMPARABLE, other[name])]
    shared = Position(1, ["000"] * 2)
    assert digest_value(shared) == digest_value(copy.deepcopy(shared)) == digest_value(made(0)["dataclass"])
    assert digest_value({"b", "a"}) == digest_value({"a", "b"})


def test_attributes_count_by_name_not_by_the_order_they_were_set_in() -> None:
    """Also where one object is met twice, and what is below a mask does not count."""
    first, second = argparse.Namespace(a=1, b=2), argparse.Namespace(b=2, a=1)
    assert digest_value([first, first]) == digest_value([second, first]) != NOT_COMPARABLE
    masked = [np.ma.masked_array([1, below], [False, True]) for below in (2, 3)]
    assert digest_value(masked[0]) == digest_value(masked[1])


@pytest.mark.parametrize("value", [1, [1]])
def test_keys_count_by_name_not_by_the_order_they_came_in(value: Any) -> None:
    """Equal dicts are made of sets, whose order differs by process; order is of an OrderedDict's value."""
    one, other = {"a": value, "b": 2}, {"b": 2, "a": value}
    kinds: tuple[Any, ...] = (
        dict,
        functools.partial(collections.defaultdict, list),
        collections.Counter,
        Thing,
    )
    assert all(digest_value([kind(one)]) == digest_value([kind(other)]) for kind in kinds)
    ordered = [digest_value([collections.OrderedDict(each)]) for each in (one, other)]
    assert ordered[0] != ordered[1]


def moved(position: int) -> Cursor:
    """One that is there now."""
    cursor = Cursor(1)
    cursor.position = position
    return cursor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (moved(1), moved(2)),
        (np.array([(1, 2)], "i4,i4"), np.array([(1, 2)], [("f1", "i4"), ("f0", "i4")])),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (collections.defaultdict(int), collections.defaultdict(list)),
        (argparse.Namespace(next=[1].index), argparse.Namespace(next=[2].index)),
    ],
    ids=["attribute of a dataclass", "names of fields", "maxlen", "factory", "bound method"],
)
def test_what_is_saved_of_a_value_besides_its_items_counts(one: Any, other: Any) -> None:
    """Rank 0's is what is saved."""
    assert NOT_COMPARABLE != digest_value(one) != digest_value(other)
    assert digest_value(one) == digest_value(copy.deepcopy(one))


@pytest.mark.timeout(20)
def test_containers_that_are_held_many_times_are_looked_at_once() -> None:
    """Of 2^60 paths to one set, and of a tree whose nodes know their parent, which know them."""
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


def test_what_contains_itself_is_not_compared() -> None:
    """It is refused where it is stored."""
    ring: list[Any] = [{1}]
    ring.append(ring)
    assert digest_value(ring) == NOT_COMPARABLE
