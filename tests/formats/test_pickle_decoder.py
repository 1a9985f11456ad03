"""Plain pickles are decoded as Python decodes them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.pickle.decoder import (
    Instance,
    decode_pickle,
)
from tests.support.formats_pickles import SOME, decode

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 300), 1 << 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers(-9, 9) | st.tuples(st.text(), st.none()), inner, max_size=5
        )
        | st.frozensets(st.text(max_size=3) | st.tuples(st.integers(-9, 9)), max_size=3)
        | st.sets(st.integers(-9, 9), max_size=3)
        | st.binary(max_size=9).map(bytearray)
    ),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None)
@given(plain_values, st.integers(4, 5))
def test_plain_values_of_both_picklers(value: Any, protocol: int) -> None:
    """Whatever plain value Python's C or Python pickler writes comes back equal, type for type."""
    if protocol == 4 and "bytearray" in repr(value):
        protocol = 5  # before 5 a bytearray is a call
    buffer = io.BytesIO()
    pickle._Pickler(buffer, protocol).dump(value)
    for data in (pickle.dumps(value, protocol), buffer.getvalue()):
        assert repr_of(decode(data)) == repr_of(value)


def repr_of(value: Any) -> Any:
    """A comparable form that tells types apart, and does not depend on the order of sets."""
    if isinstance(value, (list, tuple)):
        return (type(value), [repr_of(item) for item in value])
    if isinstance(value, dict):
        return (dict, [(repr_of(key), repr_of(item)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(map(repr, value)))
    return (type(value), repr(value))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"S'it\\'s'\n.", "it's"),
        (b'S"a\\x41"\n.', "aA"),
        (b"T\x03\0\0\0abc.", "abc"),
        (b"U\x03abc.", "abc"),
        (b"L5L\n.", 5),
        (b"L-5\n.", -5),
        (b"I01\n.", True),
        (b"F2.5\n.", 2.5),
        (b"Vt\\u00e9\n.", "té"),
        (b"(lp0\nI1\naI2\na.", [1, 2]),
        (b"(dp0\nS'k'\nI1\ns.", {"k": 1}),
        (b"(I1\nI2\nt.", (1, 2)),
        (b"(I1\nI2\nl.", [1, 2]),
        (b"(I1\nI2\nd.", {1: 2}),
        (b"I1\n2t.", None),
        (b"(I1\n1I2\n.", 2),
        (b"I1\nI2\n0.", 1),
        (b"I1\np7\n0g7\n.", 1),
        (b"I1\nr\x07\0\0\x000j\x07\0\0\0.", 1),
        (b"]2a.", None),
    ],
    ids=repr,
)
def test_opcodes_by_hand(data: bytes, value: Any) -> None:
    """Opcodes that today's picklers rarely write give what pickle gives."""
    try:
        expected = pickle.loads(data)
    except (IndexError, pickle.UnpicklingError):
        with pytest.raises(CheckpointFormatError):
            decode(data)
        return
    decoded = decode(data)
    assert repr(decoded) == repr(expected)
    assert value is None or decoded == value


def test_memo_keeps_identity_and_cycles() -> None:
    """Shared and self-referring values come back shared and self-referring."""
    shared = [1]
    cycle: list[Any] = [shared, shared]
    cycle.append(cycle)
    decoded = decode(pickle.dumps(cycle, 4))
    assert decoded[0] is decoded[1]
    assert decoded[2] is decoded


def test_allowed_globals() -> None:
    """Globals are what the caller says: inert values, constructors that get arguments, instances."""
    assert decode_pickle(b"cm\nvalue\n.", find=SOME) == "inert"
    assert decode_pickle(b"\x8c\x01m\x8c\x05value\x93.", find=SOME) == "inert"
    assert decode_pickle(b"ctorch\nSize\n((I2\nI3\nttR.", find=SOME) == (2, 3)
    thing = decode_pickle(b"\x80\x04cm\nThing\n)\x81}\x8c\x01a\x8c\x01bsb.", find=SOME)
    assert isinstance(thing, Instance)
    assert (thing.kind, thing.state) == ("Thing", {"a": "b"})
    again = decode_pickle(b"\x80\x04cm\nThing\n)}\x92.", find=SOME)
    assert isinstance(again, Instance)
    assert again.state is None


def test_persistent_ids() -> None:
    """References to data outside go to the caller's function; without one they are refused."""
    assert decode(b"\x80\x02(X\x01\0\0\0aK\x01tQ.", persistent_load=list) == ["a", 1]
    assert decode(b"Pname\n.", persistent_load=str.upper) == "NAME"
    for data in (b"\x80\x02K\x01Q.", b"Pname\n."):
        with pytest.raises(UnsafeObjectError, match="outside"):
            decode(data)
