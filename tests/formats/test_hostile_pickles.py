"""No pickle is run, and none blows up."""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.pickle.decoder import (
    decode_pickle,
)
from tests.support.formats_pickles import SOME

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


def test_every_truncation_is_an_error() -> None:
    """A pickle cut anywhere is malformed, in every protocol."""
    value = [1, 1 << 70, 2.5, "text", b"bytes", {"k": (1, 2, {3})}, None, "text"]
    for protocol in range(6):
        data = pickle.dumps(value, protocol)
        for length in range(len(data)):
            with pytest.raises(CheckpointFormatError):
                decode_pickle(data[:length], find=SOME)


Mutation = Callable[[random.Random, bytearray], None]


def flip(rng: random.Random, data: bytearray) -> None:
    """Change a bit."""
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    """Put opcodes, or bytes that are lengths, somewhere."""
    at = rng.randrange(len(data))
    data[at : at + 4] = rng.choice(
        [bytes([code]) * 4 for code in b"(.0123Rbt}]us\x81\x85\x86\x90\x91\x94\xff\0"]
    )


def remove(rng: random.Random, data: bytearray) -> None:
    """Cut a piece out."""
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 20)]


def repeat(rng: random.Random, data: bytearray) -> None:
    """Repeat a piece, up to many times."""
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randrange(1, 40)] * rng.choice([1, 1, 3, 200])


MUTATIONS: list[Mutation] = [flip, overwrite, remove, repeat]


def seeds() -> list[bytes]:
    """Real pickles to start from: plain values of all protocols, instances, calls, persistent ids."""
    value = {
        "a": [1, 2.5, "text", b"x", None, True],
        "b": ({1, 2}, frozenset("c"), {"d": (1 << 70,)}),
        "e": [],
    }
    result = [pickle.dumps([value, value], protocol) for protocol in range(6)]
    result.append(b"\x80\x04}(cm\nThing\n)\x81}\x8c\x01a\x8c\x01bsbctorch\nSize\n(K\x02K\x03t\x85Ru.")
    result.append(b"\x80\x02(X\x07\0\0\0storagecm\nvalue\nX\x01\0\0\x000K\x06tQ.")
    return result


def fuzz(rounds: int, seed: int) -> int:
    """Decode mutated pickles; how many still decoded. Anything but a typed error propagates."""
    rng = random.Random(seed)
    corpus = seeds()
    decoded = 0
    for _ in range(rounds):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randrange(1, 6)):
            if data:
                rng.choice(MUTATIONS)(rng, data)
        begin = time.thread_time()
        try:
            decode_pickle(data, find=SOME, persistent_load=lambda value: ("persistent", type(value)))
            decoded += 1
        except CheckpointFormatError:
            pass
        assert time.thread_time() - begin < MOST_SECONDS, bytes(data)
    return decoded


def test_fuzz() -> None:
    """Damaged pickles either decode or raise a typed error, quickly."""
    assert 0 < fuzz(4_000, seed=1) < 4_000


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
def test_fuzz_longer(seed: int) -> None:
    """The same for a hundred thousand of them, of several seeds."""
    assert 0 < fuzz(100_000, seed=100 + seed) < 100_000
