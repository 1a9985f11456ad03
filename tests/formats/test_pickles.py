"""The pickle decoder. Internal: each opcode and each attack on it, of which files at the door show few."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.pickle.decoder import (
    Instance,
    decode_pickle,
)
from tests.support.examples import examples
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


@examples(150)
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


MOST_SECONDS = 10.0


MOST_BYTES = 256 << 20


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class Setter:
    """Has its state set by a function of its class."""

    def __setstate__(self, state: Any) -> None:
        os.system(state)

    def __getstate__(self) -> str:
        return "touch executed"


SYSTEM = b"cposix\nsystem\n"


COMMAND = b"X\x0e\0\0\0touch executed"


ATTACKS: dict[str, bytes] = {
    "reduce": b"\x80\x02" + SYSTEM + COMMAND + b"\x85R.",
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + COMMAND + b"\x85R.",
    "inst": b"(" + COMMAND + b"iposix\nsystem\n.",
    "obj": b"(" + SYSTEM + COMMAND + b"o.",
    "newobj": b"\x80\x02" + SYSTEM + COMMAND + b"\x85\x81.",
    "newobj_ex": b"\x80\x04" + SYSTEM + COMMAND + b"\x85}\x92.",
    "build": pickle.dumps(Setter(), 2),
    "eval": b"\x80\x02c__builtin__\neval\n" + COMMAND + b"\x85R.",
    "import": b"\x80\x02c__builtin__\n__import__\n" + COMMAND + b"\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\nccollections\nOrderedDict\nX\x08\0\0\0__init__\x86R.",
    "nested name": b"\x80\x04\x8c\x0bcollections\x8c\x20OrderedDict.__init__.__globals__\x93.",
    "nested value": b"\x80\x04\x8c\x01m\x8c\x0fvalue.__class__\x93.",
    "nested module": b"\x80\x04\x8c\x08os.path.\x8c\x06system\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "extension 2": b"\x80\x02\x83\x01\0.",
    "extension 4": b"\x80\x02\x84\x01\0\0\0.",
    "build on list": b"\x80\x02]}X\x01\0\0\0aK\x01sb.",
    "build on constructor": b"\x80\x02ctorch\nSize\n}X\x06\0\0\0reduceK\x01sb.",
    "build on value": b"\x80\x02cm\nvalue\n}X\x01\0\0\0aK\x01sb.",
    "call of a value": b"\x80\x02cm\nvalue\n)R.",
    "call of a string": b"\x80\x02X\x09\0\0\0os.system" + COMMAND + b"\x85R.",
    "call of a result": b"\x80\x02ctorch\nSize\n)\x85R)R.",
    "reduce of a class": b"\x80\x02cm\nThing\n)R.",
    "new of a function": b"\x80\x02ctorch\nSize\n)\x85\x81.",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_run_nothing(name: str, tmp_path: Path) -> None:
    """Each way a pickle can call, import or look up something is refused as unsafe, and nothing ran."""
    marker = tmp_path / "marker"
    data = ATTACKS[name]
    before = set(sys.modules)
    with pytest.raises(UnsafeObjectError):
        decode_pickle(data, find=SOME)
    assert set(sys.modules) == before
    exploit = pickle.dumps(Exploit(f"touch {marker}"), 2)
    with pytest.raises(UnsafeObjectError, match=r"(posix|nt)\.system") as caught:
        decode_pickle(exploit, find=SOME)
    assert caught.value.global_name.endswith(".system")
    assert not marker.exists()


@contextmanager
def measured(limit_bytes: int) -> Iterator[None]:
    """Fails if the block holds more than ``limit_bytes`` at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "only stop": b".",
    "no stop": b"\x80\x04N",
    "two values": b"\x80\x04NN.",
    "open mark": b"\x80\x04(N.",
    "trailing": b"\x80\x04N.N",
    "unknown opcode": b"\x80\x04\xff.",
    "tuple without mark": b"t.",
    "append to int": b"\x80\x04K\x01K\x02a.",
    "set item of list": b"\x80\x04]K\x01K\x02s.",
    "add to list": b"\x80\x04](K\x01\x90.",
    "odd items": b"\x80\x04}(K\x01u.",
    "unknown memo": b"\x80\x04h\x00.",
    "memo of nothing": b"\x80\x04\x94.",
    "negative memo": b"I1\np-1\n.",
    "negative get": b"I1\np0\n0g-1\n.",
    "memo without number": b"I1\npx\n.",
    "duplicate key": b"\x80\x04}(K\x01NK\x01Nu.",
    "duplicate equal key": b"\x80\x04}(K\x01N\x88Nu.",
    "duplicate later": b"\x80\x04}K\x01NsK\x01Ns.",
    "list as key": b"\x80\x04}]Ns.",
    "dict in tuple as key": b"\x80\x04}}\x85Ns.",
    "set as key": b"\x80\x04}\x8fNs.",
    "list in set": b"\x80\x04\x8f(]\x90.",
    "list in frozenset": b"\x80\x04(]\x91.",
    "long beyond end": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "negative long": b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
    "huge text": b"\x80\x04X\xff\xff\xff\xffx.",
    "huge text 8": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffx.",
    "huge bytes 8": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "huge bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "negative string": b"T\xff\xff\xff\xffx.",
    "huge frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "bad utf-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "bad string": b"S'x\n.",
    "bad int": b"Ix\n.",
    "bad float": b"Fx\n.",
    "bad long": b"Lx\n.",
    "decimal bomb": b"L" + b"9" * 1_000_000 + b"L\n.",
    "global name not text": b"\x80\x04K\x01K\x02\x93.",
    "global without name": b"cposix\n",
    "reduce without tuple": b"\x80\x04ctorch\nSize\nK\x01R.",
    "new without tuple": b"\x80\x04cm\nThing\nK\x01\x81.",
    "new with arguments": b"\x80\x04cm\nThing\nK\x01\x85\x81.",
    "names given": b"\x80\x04cm\nThing\n)}K\x01Ns\x92.",
    "deep marks": b"(" * 1_000_000 + b".",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    """Bytes that no pickler writes are a format error, quickly, and never another exception."""
    begin = time.thread_time()
    with pytest.raises(CheckpointFormatError), measured(MOST_BYTES):
        decode_pickle(MALFORMED[name], find=SOME)
    assert time.thread_time() - begin < MOST_SECONDS
