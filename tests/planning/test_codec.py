"""Plan columns as bytes. Internal: pure; inverse, and no trust in what arrives."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.planners.columns import SaveColumns
from dcp.planners.save.global_plan import plan_save
from dcp.planners.value_digests import NOT_COMPARABLE
from dcp.planners.wire.codec import (
    VERSION,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.storage.errors import CheckpointFormatError
from tests.support.examples import examples
from tests.support.planning_simulation import save_columns, tensor_shapes, worlds


def fields(columns: Any) -> dict[str, Any]:
    """Columns as comparable plain data."""
    return {
        field.name: value.tolist() if isinstance(value := getattr(columns, field.name), np.ndarray) else value
        for field in dataclasses.fields(columns)
        if field.name != "objects" or isinstance(getattr(columns, field.name), np.ndarray)
    }


paths = st.dictionaries(
    st.text(max_size=5), st.lists(st.text(max_size=3) | st.integers(0, 9), max_size=4).map(tuple)
)


@examples(50)
@given(
    data=st.data(),
    shapes=tensor_shapes,
    objects=st.dictionaries(st.text(max_size=4), st.integers(0, NOT_COMPARABLE - 1), max_size=3),
    planner_data=st.none() | paths,
)
def test_decoding_is_the_inverse_of_encoding(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]], objects: dict[str, int], planner_data: Any
) -> None:
    """Every column of every rank's plan and of the replies survives, names of any characters included."""
    ranks = data.draw(worlds(shapes))
    sent = [save_columns(tensors, objects, planner_data=planner_data) for tensors in ranks]
    for columns in sent:
        received = decode_save_columns(encode_save_columns(columns))
        assert fields(received) == fields(columns)
        assert received.objects.fqns == columns.objects.fqns
        assert received.objects.digests.tolist() == columns.objects.digests.tolist()
        assert received.item_digests.dtype == np.uint64
    for writes in plan_save(sent).writes:
        assert fields(decode_write_columns(encode_write_columns(writes))) == fields(writes)


def example() -> SaveColumns:
    """A small plan with something in every column."""
    from tests.planning.test_save_plans import whole

    columns = save_columns({"a": whole((2, 3)), "b": whole((4,))}, {"lr": 3}, planner_data={"a": ("a", 0)})
    return dataclasses.replace(columns, stride_orders={0: (1, 0)})


def changed(data: bytes, section: str | None, name: str, value: Any) -> bytes:
    """``data`` with one field replaced."""
    message = msgpack.unpackb(data)
    if section is None:
        message[name] = value
    else:
        inner = msgpack.unpackb(message[section])
        inner[name] = value
        message[section] = msgpack.packb(inner)
    packed: bytes = msgpack.packb(message)
    return packed


def column(*values: int) -> list[Any]:
    """A column as the codec encodes it."""
    return [len(values), None, 0, 8, 0, np.array(values, "<i8").tobytes()]


HOSTILE = [
    (None, "version", VERSION + 1),
    (None, "items", 7),
    (None, "names", b"\xc1"),
    ("names", "dtypes", column(200, 1)),
    ("names", "ndims", column(2, -1)),
    ("names", "ndims", column(1, 1)),
    ("names", "shapes", column(2, 3, -4)),
    ("names", "shapes", [1 << 40, None, 0, 0, 0, b""]),
    ("names", "orders", [[0, [0, 0]]]),
    ("names", "orders", [[5, [0]]]),
    ("names", "fqns", None),
    ("items", "item_tensors", column(0, 2)),
    ("items", "item_tensors", column(0)),
    ("items", "item_sizes", column(2, 3)),
    ("items", "object_sizes", column()),
    ("items", "item_ties", column(1, 2, 3)),
]


@pytest.mark.parametrize(("section", "name", "value"), HOSTILE, ids=lambda value: str(value)[:20])
def test_malformed_plans_are_refused(section: str | None, name: str, value: Any) -> None:
    """Unknown versions, lying counts, wrong lengths, unknown dtypes: a typed error, never a wrong plan."""
    with pytest.raises(CheckpointFormatError):
        decode_save_columns(changed(encode_save_columns(example()), section, name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 9),
        ("sources", column(1)),
        ("ndims", column(2, 2)),
        ("shares", column(-1, 1)),
        ("shares", column(-2, -1)),
        ("objects", column()),
    ],
)
def test_malformed_writes_are_refused(name: str, value: Any) -> None:
    """The same for what the coordinator sends back: a payload is shared with an earlier row only."""
    data = encode_write_columns(plan_save([example()]).writes[0])
    with pytest.raises(CheckpointFormatError):
        decode_write_columns(changed(data, None, name, value))


@examples(200)
@given(data=st.data())
def test_damaged_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    """Flipping any byte gives a plan or a CheckpointFormatError."""
    encoded = bytearray(encode_save_columns(example()))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointFormatError):
        assert isinstance(decode_save_columns(bytes(encoded)), SaveColumns)
