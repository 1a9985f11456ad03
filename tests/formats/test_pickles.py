"""Pickles. Internal: each opcode and each attack on the decoder; public files show few of them."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.pickle.decoder import Constructor, allow_list, decode_pickle, instances
from dcp.storage.formats.torch.pickle_reader import decode_tensor_pickle
from tests.support.examples import examples

NOTHING = allow_list({}, what="the test")
SOME = allow_list(
    {
        ("torch", "Size"): Constructor("torch.Size", reduce=lambda args: tuple(args[0])),
        ("builtins", "bytes"): Constructor("bytes", reduce=lambda args: bytes(args[0])),
        ("m", "Thing"): instances("Thing"),
        ("m", "value"): "inert",
        ("collections", "OrderedDict"): Constructor("OrderedDict", reduce=lambda args: {}),
    },
    what="the test",
)


def decode(data: bytes, **named: Any) -> Any:
    """Decode a pickle with an empty allow-list."""
    return decode_pickle(data, find=NOTHING, **named)


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
    """A plain value from Python's C or Python pickler decodes to an equal value of equal types."""
    if protocol == 4 and "bytearray" in repr(value):
        protocol = 5  # before 5 a bytearray is a call
    buffer = io.BytesIO()
    pickle._Pickler(buffer, protocol).dump(value)
    for data in (pickle.dumps(value, protocol), buffer.getvalue()):
        assert repr_of(decode(data)) == repr_of(value)


def repr_of(value: Any) -> Any:
    """Return a comparable form that distinguishes types and ignores the order of sets."""
    if isinstance(value, (list, tuple)):
        return (type(value), [repr_of(item) for item in value])
    if isinstance(value, dict):
        return (dict, [(repr_of(key), repr_of(item)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(map(repr, value)))
    return (type(value), repr(value))


def test_memo_keeps_identity_and_cycles() -> None:
    """Shared and self-referring values are decoded with the same identities."""
    shared = [1]
    cycle: list[Any] = [shared, shared]
    cycle.append(cycle)
    decoded = decode(pickle.dumps(cycle, 4))
    assert decoded[0] is decoded[1]
    assert decoded[2] is decoded


class Exploit:
    """Object that runs a command when unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


class Setter:
    """Object whose state is set by a function of its class."""

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
    "exploit": pickle.dumps(Exploit(), 2),
    "build": pickle.dumps(Setter(), 2),
    "eval": b"\x80\x02c__builtin__\neval\n" + COMMAND + b"\x85R.",
    "import": b"\x80\x02c__builtin__\n__import__\n" + COMMAND + b"\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\nccollections\nOrderedDict\nX\x08\0\0\0__init__\x86R.",
    "nested name": b"\x80\x04\x8c\x0bcollections\x8c\x20OrderedDict.__init__.__globals__\x93.",
    "nested value": b"\x80\x04\x8c\x01m\x8c\x0fvalue.__class__\x93.",
    "nested module": b"\x80\x04\x8c\x08os.path.\x8c\x06system\x93.",
    "extension": b"\x80\x02\x82\x01.",
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
def test_attacks_run_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way in which a pickle can call, import or look up an object is refused without running code."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    with pytest.raises(UnsafeObjectError) as caught:
        decode_pickle(ATTACKS[name], find=SOME)
    assert set(sys.modules) == before and not any(tmp_path.iterdir())
    assert name != "exploit" or caught.value.global_name.endswith(".system")


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "no stop": b"\x80\x04N",
    "open mark": b"\x80\x04(N.",
    "trailing": b"\x80\x04N.N",
    "unknown opcode": b"\x80\x04\xff.",
    "append to int": b"\x80\x04K\x01K\x02a.",
    "add to list": b"\x80\x04](K\x01\x90.",
    "unknown memo": b"\x80\x04h\x00.",
    "negative memo": b"I1\np-1\n.",
    "memo without number": b"I1\npx\n.",
    "duplicate key": b"\x80\x04}(K\x01NK\x01Nu.",
    "list as key": b"\x80\x04}]Ns.",
    "set as key": b"\x80\x04}\x8fNs.",
    "list in set": b"\x80\x04\x8f(]\x90.",
    "long beyond end": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "huge text 8": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffx.",
    "huge bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "negative string": b"T\xff\xff\xff\xffx.",
    "huge frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "bad utf-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "bad string": b"S'x\n.",
    "bad float": b"Fx\n.",
    "decimal bomb": b"L" + b"9" * 1_000_000 + b"L\n.",
    "global name not text": b"\x80\x04K\x01K\x02\x93.",
    "reduce without tuple": b"\x80\x04ctorch\nSize\nK\x01R.",
    "new with arguments": b"\x80\x04cm\nThing\nK\x01\x85\x81.",
    "deep marks": b"(" * 1_000_000 + b".",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles_are_format_errors(name: str) -> None:
    """Bytes that no pickler writes are a format error, quickly, and never another exception."""
    tracemalloc.start()
    begin = time.thread_time()
    try:
        with pytest.raises(CheckpointFormatError, match="^the pickle is empty" if name == "empty" else None):
            decode_pickle(MALFORMED[name], find=SOME)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - begin < 10.0


# -- tensors -------------------------------------------------------------------------------------------------


def forged(
    *,
    storage: bytes = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ",
    sizes: bytes = b"K\x02K\x03\x86",
    function: bytes = b"_rebuild_tensor_v2",
    rest: bytes = b"",
) -> bytes:
    """Return a tensor's pickle with replaced parts; by default a valid tensor of two by three floats."""
    hooks = b"ccollections\nOrderedDict\n)R"
    head = b"\x80\x02ctorch._utils\n" + function + b"\n("
    return head + storage + b"K\0" + sizes + b"K\x03K\x01\x86\x89" + hooks + rest + b"tR."


FROM_TYPE = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
HUGE = b"\x8a\x09" + b"\xff" * 8 + b"\x00"
FORGED: dict[str, bytes] = {
    "huge storage": forged(
        storage=b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + HUGE + b"tQ"
    ),
    "bool as size": forged(sizes=b"\x88K\x03\x86"),
    "list of sizes": forged(sizes=b"](K\x02K\x03e"),
    "no storage": forged(storage=b"N"),
    "storage of another kind": forged(storage=b"(X\x07\0\0\0storagectorch\nTensor\nX\x01\0\0\x000NK\x06tQ"),
    "storage not a tuple": forged(storage=b"NQ"),
    "module, not storage": forged(storage=b"(X\x06\0\0\0modulectorch\nTensor\nX\x01\0\0\x000NK\x06tQ"),
    "long key": forged(
        storage=b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x64\0\0\0" + b"0" * 100 + b"NK\x06tQ"
    ),
    "arguments missing": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "v3 without dtype": forged(function=b"_rebuild_tensor_v3", rest=b"N"),
    "parameter of nothing": b"\x80\x02ctorch._utils\n_rebuild_parameter\n(N\x89NtR.",
    "type function": FROM_TYPE + b"ccollections\nOrderedDict\nctorch\nTensor\n)NtR.",
    "hooks": b"\x80\x02ccollections\nOrderedDict\n](K\x01K\x02\x86e\x85R.",
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tensors_are_format_errors(name: str) -> None:
    """A pickled tensor that exceeds its storage, or is no tensor, is a format error."""
    with pytest.raises(CheckpointFormatError):
        decode_tensor_pickle(FORGED[name])
