"""The state of a pickle's interpreter, stack and memo, and the bounds that keep them linear in the data.

What a pickle could use to break that is bounded: containers and memo entries per byte, values copied by
constructors, integers, nesting of marks, and the keys of dicts and sets, which must be cheap to hash.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp.storage.formats.container_notes import NO_PLAIN_KEY, plain_key
from dcp.storage.formats.pickle.values import BuiltDict, Constructor, Find, Ignored, Instance, Limits

__all__ = ["DOUBLE", "INT32", "UINT16", "UINT32", "UINT64", "Handler", "PickleMachine"]

Handler: TypeAlias = "Callable[[PickleMachine], Any]"

UINT16 = struct.Struct("<H")
INT32 = struct.Struct("<i")
UINT32 = struct.Struct("<I")
UINT64 = struct.Struct("<Q")
DOUBLE = struct.Struct(">d")

_CHEAP_KEYS = frozenset((str, bytes, bool, float, type(None)))
_COPIES = frozenset((str, bytes, bytearray, list, dict, set, frozenset, BuiltDict))
_OWN_HASH = 1 << 60
"""Below it an int is its own hash; larger ones can be chosen to collide (hashes are modulo 2**61 - 1)."""


class Stop(Exception):
    """STOP was reached; control flow only."""


class PickleMachine:
    """One pickle being decoded; each method that is named after an opcode does what that opcode does."""

    __slots__ = (
        "containers",
        "copied",
        "data",
        "find",
        "large_keys",
        "limits",
        "marks",
        "memo",
        "memo_limit",
        "persistent",
        "pos",
        "stack",
    )

    def __init__(
        self, data: bytes, find: Find, persistent_load: Callable[[Any], Any] | None, limits: Limits
    ) -> None:
        if len(data) > limits.data_bytes:
            raise CheckpointFormatError(
                f"a pickle of {len(data)} bytes is above the limit of {limits.data_bytes}",
                size_bytes=len(data),
            )
        self.data = data
        self.pos = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below each open MARK
        self.memo: dict[int, Any] = {}
        self.find = find
        self.persistent = persistent_load
        self.limits = limits
        self.containers = int(len(data) * limits.containers_per_byte) + limits.free
        self.large_keys = limits.large_keys
        self.memo_limit = self.containers
        self.copied = int(len(data) * limits.copied_per_byte) + limits.free

    def run(self, table: Sequence[Handler]) -> Any:
        """The value of the pickle; ``table`` has a handler for each of the 256 opcodes."""
        data = self.data
        try:
            while True:
                pos = self.pos
                self.pos = pos + 1
                table[data[pos]](self)
        except Stop:
            return self._result()
        except CheckpointError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            # e.g. an empty stack, an unknown memo entry, a value cut off by the end of the data
            raise self.malformed(f"{type(error).__name__}") from error

    def _result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise self.malformed(f"{len(self.stack)} values at its end")
        if self.pos != len(self.data):
            raise self.malformed(f"{len(self.data) - self.pos} bytes follow its end")
        return self.stack[0]

    def malformed(self, reason: str) -> CheckpointFormatError:
        """The error for bytes that no pickler writes; ``reason`` completes the sentence."""
        return CheckpointFormatError(
            f"the pickle is malformed at byte {self.pos} of {len(self.data)}: {reason}", position=self.pos
        )

    # -- reading -------------------------------------------------------------------------------------------

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        begin, end = self.pos, self.pos + length
        if length < 0 or end > len(self.data):
            raise self.malformed(f"a value of {length} bytes reaches beyond the end")
        self.pos = end
        return self.data[begin:end]

    def number(self, layout: struct.Struct) -> Any:
        """The next number."""
        value = layout.unpack_from(self.data, self.pos)[0]
        self.pos += layout.size
        return value

    def line(self) -> bytes:
        """The bytes up to the next newline, which is skipped: an argument of protocol 0."""
        begin = self.pos
        end = self.data.index(b"\n", begin)
        self.pos = end + 1
        return self.data[begin:end]

    # -- bounds --------------------------------------------------------------------------------------------

    def contain(self, count: int = 1) -> None:
        """Count containers about to be made."""
        self.containers -= count
        if self.containers < 0:
            raise self.malformed("it makes more objects than a pickle of its length holds")

    def copy(self, length: int) -> None:
        """Count the length of a value that is not the file's own bytes."""
        self.copied -= length
        if self.copied < 0:
            raise self.malformed("it repeats values to many times its own length")

    def key(self, key: Any) -> Any:
        """``key``, or what stands for it: hashing must take time linear in the file, and must not collide at
        the file's will. Numbers and strings of numpy's are plain ones, other types `Ignored`."""
        if isinstance(key, np.generic) and (plain := plain_key(key)) is not NO_PLAIN_KEY:
            key = plain
        pending = [key]
        for _ in range(self.limits.key_parts):
            if not pending:
                return key
            item = pending.pop()
            kind = type(item)
            if kind is tuple:
                self.copy(len(item) + 1)
                pending.extend(item)
            elif kind is int:
                if not -_OWN_HASH < item < _OWN_HASH:
                    self.large_keys -= 1
                    if self.large_keys < 0:
                        raise self.malformed("too many integer keys beyond 60 bits")
            elif kind not in _CHEAP_KEYS and not isinstance(item, Instance):
                if kind.__hash__ is None:
                    raise self.malformed(f"a {kind.__name__} as a key")
                self.contain()
                return Ignored(getattr(item, "kind", None) or f"a {kind.__name__}")
        raise self.malformed("a key of too many parts")

    # -- containers ----------------------------------------------------------------------------------------

    def pop_mark(self) -> list[Any]:
        """The values pushed since the last MARK."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def mark(self) -> None:
        """MARK."""
        if len(self.marks) >= self.limits.marks:
            raise self.malformed("it is nested too deeply")
        self.marks.append(self.stack)
        self.stack = []

    def push_container(self, value: Any) -> None:
        """Push a new container."""
        self.contain()
        self.stack.append(value)

    def empty_set(self) -> None:
        """EMPTY_SET."""
        self.contain(4)  # an empty set is larger than other containers
        self.stack.append(set())

    def frozenset(self) -> None:
        """FROZENSET."""
        items = self.pop_mark()
        self.contain(4)
        self.stack.append(frozenset(map(self.key, items)))

    def dict(self) -> None:
        """DICT."""
        items = self.pop_mark()
        self.push_container({})
        self.set_items(items)

    def tuple1(self) -> None:
        """TUPLE1."""
        self.stack[-1] = (self.stack[-1],)
        self.contain()

    def tuple2(self) -> None:
        """TUPLE2."""
        last = self.stack.pop()
        self.stack[-1] = (self.stack[-1], last)
        self.contain()

    def tuple3(self) -> None:
        """TUPLE3."""
        last = self.stack.pop()
        middle = self.stack.pop()
        self.stack[-1] = (self.stack[-1], middle, last)
        self.contain()

    def extend(self, items: list[Any]) -> None:
        """APPEND and APPENDS."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Ignored):
            raise self.malformed(f"appends to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """SETITEMS; ``items`` are keys and values in turn."""
        target = self.stack[-1]
        if isinstance(target, Ignored):
            return
        if not isinstance(target, dict):
            raise self.malformed(f"sets an item of a {type(target).__name__}")
        if len(items) % 2:
            raise self.malformed("a key without a value")
        keys = [key if type(key) is str else self.key(key) for key in items[::2]]
        expected = len(target) + len(keys)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != expected:
            raise self.malformed("a key stands twice in one dict")

    def set_item(self) -> None:
        """SETITEM."""
        value = self.stack.pop()
        key = self.stack.pop()
        self.set_items([key, value])

    def add_items(self) -> None:
        """ADDITEMS."""
        items = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise self.malformed(f"adds items to a {type(target).__name__}")
        target.update(map(self.key, items))

    # -- memo ----------------------------------------------------------------------------------------------

    def memoize(self) -> None:
        """MEMOIZE."""
        self.put(len(self.memo))

    def put(self, number: int) -> None:
        """BINPUT and LONG_BINPUT; a dict, so that a huge number costs no more than a small one."""
        memo = self.memo
        memo[number] = self.stack[-1]
        if len(memo) > self.memo_limit:
            raise self.malformed("it remembers more values than a pickle of its length holds")

    def put_line(self) -> None:
        """PUT."""
        number = int(self.line())
        if number < 0:
            raise self.malformed("a negative memo number")
        self.put(number)

    def binget(self) -> None:
        """BINGET."""
        pos = self.pos
        self.stack.append(self.memo[self.data[pos]])
        self.pos = pos + 1

    def long_binget(self) -> None:
        """LONG_BINGET."""
        pos = self.pos
        self.stack.append(self.memo[UINT32.unpack_from(self.data, pos)[0]])
        self.pos = pos + 4

    # -- values --------------------------------------------------------------------------------------------

    def binint1(self) -> None:
        """BININT1."""
        pos = self.pos
        self.stack.append(self.data[pos])
        self.pos = pos + 1

    def text(self, length: int) -> None:
        """BINUNICODE and BINUNICODE8."""
        self.stack.append(str(self.take(length), "utf-8", "surrogatepass"))

    def short_text(self) -> None:
        """SHORT_BINUNICODE."""
        begin = self.pos + 1
        end = begin + self.data[begin - 1]
        if end > len(self.data):
            raise self.malformed("a string reaches beyond the end")
        self.pos = end
        self.stack.append(str(self.data[begin:end], "utf-8", "surrogatepass"))

    def binary(self, length: int) -> None:
        """BINBYTES and its relatives."""
        self.stack.append(self.take(length))

    def old_text(self, length: int) -> None:
        """Python 2's str; torch reads it as UTF-8."""
        self.stack.append(str(self.take(length), "utf-8"))

    def quoted(self) -> None:
        """STRING."""
        line = self.line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.malformed("a string without quotes")
        self.stack.append(str(codecs.escape_decode(line[1:-1])[0], "utf-8"))

    def decimal(self) -> None:
        """INT, which also has the booleans of protocol 0."""
        line = self.line()
        fixed = {b"00": False, b"01": True}
        self.stack.append(fixed[line] if line in fixed else int(line))

    def long(self, length: int) -> None:
        """LONG1 and LONG4."""
        if length > self.limits.integer_bytes:
            raise self.malformed(f"an integer of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    # -- objects -------------------------------------------------------------------------------------------

    def line_global(self) -> None:
        """GLOBAL."""
        module = str(self.line(), "utf-8")
        self.stack.append(self.find(module, str(self.line(), "utf-8")))

    def stack_global(self) -> None:
        """STACK_GLOBAL."""
        name = self.stack.pop()
        module = self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self.malformed("a global whose name is not a string")
        self.stack.append(self.find(module, name))

    def reduce(self) -> None:
        """REDUCE."""
        args = self.stack.pop()
        function = self.stack[-1]
        if isinstance(function, Ignored):
            return
        if type(function) is not Constructor or function.reduce is None:
            raise _not_callable(function)
        if type(args) is not tuple:
            raise self.malformed("arguments that are not a tuple")
        value = function.reduce(args)
        if type(value) in _COPIES:
            self.copy(len(value))
        self.contain()
        self.stack[-1] = value

    def new(self) -> None:
        """NEWOBJ."""
        args = self.stack.pop()
        cls = self.stack[-1]
        if type(cls) is not Constructor or cls.new is None:
            raise _not_callable(cls)
        if type(args) is not tuple:
            raise self.malformed("arguments that are not a tuple")
        self.contain()
        self.stack[-1] = cls.new(args)

    def new_with_names(self) -> None:
        """NEWOBJ_EX."""
        if self.stack.pop() != {}:
            raise self.malformed("keyword arguments, which no class on the list takes")
        self.new()

    def build(self) -> None:
        """BUILD."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if not isinstance(instance, (Instance, BuiltDict)):
            raise UnsafeObjectError(
                f"the pickle sets the state of a {type(instance).__name__}; nothing was run"
            )
        instance.build(state)

    def persistent_id(self, value: Any) -> None:
        """PERSID and BINPERSID."""
        if self.persistent is None:
            raise UnsafeObjectError(
                "the pickle refers to data outside itself, which this kind of file has not"
            )
        self.contain()
        self.stack.append(self.persistent(value))

    # -- structure -----------------------------------------------------------------------------------------

    def proto(self) -> None:
        """PROTO."""
        version = self.data[self.pos]
        self.pos += 1
        if version > 5:
            raise UnsupportedFormatError(f"pickle protocol {version} is newer than 5", protocol=version)

    def frame(self) -> None:
        """FRAME, a hint for buffering only."""
        if self.number(UINT64) > len(self.data) - self.pos:
            raise self.malformed("a frame reaches beyond the end")

    def stop(self) -> NoReturn:
        """STOP."""
        raise Stop

    def pop(self) -> None:
        """POP."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def unknown(self) -> NoReturn:
        """A byte that is no opcode."""
        code = self.data[self.pos - 1]
        raise self.malformed(f"no opcode is {code:#04x}")

    def foreign_object(self) -> NoReturn:
        """INST and OBJ: Python 2's classes."""
        raise UnsafeObjectError(
            "the pickle makes an object by the opcodes INST or OBJ, which are not allowed"
        )

    def extension(self) -> NoReturn:
        """EXT1, EXT2 and EXT4."""
        raise UnsafeObjectError("the pickle uses the extension registry, which is not allowed")

    def buffer(self) -> NoReturn:
        """NEXT_BUFFER and READONLY_BUFFER."""
        raise UnsupportedFormatError("the pickle's buffers are out of band, and there are none with it")


def _not_callable(value: Any) -> UnsafeObjectError:
    name = value.name if type(value) is Constructor else f"a {type(value).__name__}"
    return UnsafeObjectError(
        f"the pickle calls {name}, which is not allowed; nothing was run", global_name=name
    )
