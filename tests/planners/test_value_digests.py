"""Values that are no plain data are compared between ranks by what they are, not by how they are pickled."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import io
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.value_digests import digest_value


@dataclasses.dataclass
class Position:
    """Of a loader."""

    epoch: int
    order: Any


class Phase(enum.Enum):
    """Of training."""

    WARM = 1
    COLD = 2


class Opaque:
    """Nobody knows when two of these are equal."""


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
    }


def digests_of(state: dict[str, Any]) -> dict[str, int]:
    """As a save compares them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    local = planner.create_local_columns(digests=False)
    objects = local.digested_objects("sampled")
    if not any(isinstance(value, torch.Generator | Opaque) for value in state.values()):
        staged = local.encoded().digested_objects("sampled")
        assert staged.digests.tolist() == objects.digests.tolist()
    return dict(zip(objects.fqns, objects.digests.tolist(), strict=True))


def test_equal_values_have_one_digest_and_others_another() -> None:
    """Equal ones are made apart, and one of them once more by a copy, which shares parts otherwise."""
    one, again, other = (digests_of(made(number)) for number in (0, 0, 1))
    assert one == again
    assert not [name for name, digest in one.items() if digest in (0, other[name])]
    shared = Position(1, ["000"] * 2)
    assert digest_value(shared) == digest_value(copy.deepcopy(shared)) == digest_value(made(0)["dataclass"])
    assert digest_value({"b", "a"}) == digest_value({"a", "b"})


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], {"a": {1: (Opaque,)}}, Position(1, Opaque())])
def test_objects_of_unknown_classes_are_not_compared(value: Any) -> None:
    """Their pickles may differ where they are equal."""
    assert digest_value(value) == 0


def test_what_contains_itself_is_not_compared() -> None:
    """It is refused where it is stored."""
    ring: list[Any] = [{1}]
    ring.append(ring)
    assert digest_value(ring) == 0
