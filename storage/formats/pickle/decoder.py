"""Pickle decoder: an interpreter of pickle opcodes that runs no code from the file.

Nothing is imported, and no attribute is looked up by name. The caller's ``find`` maps the module and name
of a global to an inert value or a `Constructor`, the only callable of REDUCE and NEWOBJ. BUILD applies to
an `Instance` and only keeps the state. Supported are the opcodes of protocols 0 to 5 (see the standard
library's `pickletools`), except INST, OBJ, the extension registry and out-of-band buffers, which
checkpoints do not use.

Work and memory are linear in the length of the pickle: containers and memo entries, values copied by
constructors, integers, nesting of marks, and hashes of keys are limited. `pickle.Unpickler` with
``find_class`` is four times faster but unbounded: nine bytes that set memo entry 200,000,000 take 3 GB of
memory, and a key of 40 nested pairs takes 2**40 steps to hash. The result may be deep, shared or
self-referential; callers must bound their traversal.
"""

from __future__ import annotations

import codecs
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias

import numpy as np

from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp.storage.formats.container_notes import NO_PLAIN_KEY, plain_key

_DTYPE_NAME: Final = re.compile(r"q?u?(int|bits|b?float|b?complex)\d[a-z0-9_]{0,40}")

Find: TypeAlias = Callable[[str, str], Any]
"""Function (module, name) -> inert value or `Constructor` of a global; raises UnsafeObjectError."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """Callable global: as a function by REDUCE, as a class by NEWOBJ; None if not allowed.

    The functions belong to this package. They receive the arguments as a tuple, check them, and raise
    CheckpointFormatError.
    """

    name: str
    reduce: Callable[[tuple[Any, ...]], Any] | None = None
    new: Callable[[tuple[Any, ...]], Any] | None = None


class Instance:
    """Object of a foreign class, not instantiated: class name and state of BUILD.

    Compared and hashed by identity, and therefore usable as a key.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Set the state."""
        self.state = state


class Ignored(Instance):
    """Placeholder for a value of a disallowed class that spoils a single entry: accepts all operations and
    keeps nothing.

    ``kind`` names the class or function; ``is_tensor`` is set in place of a tensor.
    """

    __slots__ = ("is_tensor",)

    def __init__(self, kind: str, *, is_tensor: bool = False) -> None:
        super().__init__(kind)
        self.is_tensor = is_tensor

    def build(self, state: Any) -> None:
        """Ignore the state."""


class BuiltDict(dict[Any, Any]):
    """Dict of the subclass ``kind`` ("collections.OrderedDict") with the state of BUILD."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, items: Mapping[Any, Any] | None = None) -> None:
        super().__init__(items or {})
        self.kind = kind
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Set the state."""
        self.state = state


def instances(name: str, make: Callable[[str], Instance] = Instance) -> Constructor:
    """Return a class whose objects are made by ``make``; NEWOBJ takes no arguments, REDUCE is refused."""

    def new(args: tuple[Any, ...]) -> Instance:
        if args:
            raise CheckpointFormatError(
                f"the pickle creates a {name} with {len(args)} arguments, but the class takes none"
            )
        return make(name)

    return Constructor(name, new=new)


def allow_list(allowed: Mapping[tuple[str, str], Any], *, what: str) -> Find:
    """Return a ``find`` for the names in ``allowed``; ``what`` names the file in errors.

    The function raises UnsafeObjectError for other names, UnsupportedFormatError for unknown dtypes of
    torch.
    """

    def find(module: str, name: str) -> Any:
        try:
            return allowed[module, name]
        except KeyError:
            full = f"{module}.{name}"[:200]
            if module == "torch" and _DTYPE_NAME.fullmatch(name):
                raise UnsupportedFormatError(
                    f"{what} names the dtype {full}, which is unknown here: it was written by a newer torch; "
                    "load the checkpoint with that torch",
                    global_name=full,
                ) from None
            raise UnsafeObjectError(
                f"{what} names {full!a}, which is not on the allow-list; no code was run. If you trust the "
                f"file, load it with stock torch and save it again",
                global_name=full,
            ) from None

    return find


Handler: TypeAlias = "Callable[[_Machine], Any]"

_MAX_PICKLE_BYTES: Final = 1 << 30
_CONTAINERS_PER_BYTE: Final = 0.5
"""Maximum number of containers (lists, dicts, tuples, sets, instances), and separately of memo entries, per
byte. Real pickles have one in ten bytes.
"""
_COPIED_PER_BYTE: Final = 4
"""Maximum copied length per byte: results of constructors, and tuple keys."""
_FREE: Final = 1 << 12
"""Minimum allowance for short pickles."""
_MAX_MARKS: Final = 1 << 10
_MAX_INTEGER_BYTES: Final = 1 << 10
_MAX_KEY_PARTS: Final = 1 << 8
_TOO_MANY: Final = "it creates too many objects for its length"
_MAX_LARGE_KEYS: Final = 1 << 12
"""Maximum number of integer keys beyond 60 bits, which can be chosen to collide."""

_UINT16: Final = struct.Struct("<H")
_INT32: Final = struct.Struct("<i")
_UINT32: Final = struct.Struct("<I")
_UINT64: Final = struct.Struct("<Q")
_DOUBLE: Final = struct.Struct(">d")

_CHEAP_KEYS: Final = frozenset((str, bytes, bool, float, type(None)))
_COPIES: Final = frozenset((str, bytes, bytearray, list, dict, set, frozenset, BuiltDict))
_OWN_HASH: Final = 1 << 60
"""Integers below are their own hash; larger ones can be chosen to collide (hashes are modulo 2**61 - 1)."""


def decode_pickle(
    data: bytes | bytearray | memoryview,
    *,
    find: Find,
    persistent_load: Callable[[Any], Any] | None = None,
    limit_bytes: int = _MAX_PICKLE_BYTES,
    containers_per_byte: float = _CONTAINERS_PER_BYTE,
) -> Any:
    """Return the value of a pickle that fills ``data``, with globals from ``find``.

    ``limit_bytes`` bounds the cost, which is linear in the data.

    Raises:
        UnsafeObjectError: For a global, call or persistent id that is not allowed.
        UnsupportedFormatError: For protocols above 5 and out-of-band buffers.
        CheckpointFormatError: For other invalid data: truncated, malformed, trailing bytes, duplicate keys,
            above the limits.
    """
    if len(data) > limit_bytes:
        raise CheckpointFormatError(
            f"the pickle has {len(data)} bytes, more than the limit of {limit_bytes}", size_bytes=len(data)
        )
    return _Machine(bytes(data), find, persistent_load, containers_per_byte).run()


class _Stop(Exception):
    """Signal of the STOP opcode."""


class _Machine:
    """State of one pickle; methods named after opcodes execute them."""

    __slots__ = (
        *("containers", "copied", "data", "find", "large_keys", "marks", "memo", "memo_limit"),
        *("persistent", "pos", "stack"),
    )

    def __init__(
        self,
        data: bytes,
        find: Find,
        persistent_load: Callable[[Any], Any] | None,
        containers_per_byte: float,
    ) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below each open MARK
        self.memo: dict[int, Any] = {}
        self.find = find
        self.persistent = persistent_load
        self.containers = self.memo_limit = int(len(data) * containers_per_byte) + _FREE
        self.copied = len(data) * _COPIED_PER_BYTE + _FREE
        self.large_keys = _MAX_LARGE_KEYS

    def run(self) -> Any:
        """Return the value of the pickle."""
        data, table = self.data, _TABLE
        if not data:  # left by a crash or a full disk
            raise CheckpointFormatError(
                "the pickle is empty, as after a crash or a full disk: the data is lost", position=0
            )
        try:
            while True:
                pos = self.pos
                self.pos = pos + 1
                table[data[pos]](self)
        except _Stop:
            if len(self.stack) != 1 or self.marks:
                raise self.malformed(f"{len(self.stack)} values at the end, expected 1") from None
            if self.pos != len(self.data):
                raise self.malformed(f"{len(self.data) - self.pos} bytes follow the end") from None
            return self.stack[0]
        except CheckpointError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            # e.g. an empty stack, an unknown memo entry, a value truncated by the end of the data
            raise self.malformed(f"{type(error).__name__}: {error!s:.100}") from error

    def malformed(self, reason: str) -> CheckpointFormatError:
        """Return the error for invalid bytes; ``reason`` completes the sentence."""
        return CheckpointFormatError(
            f"the pickle is malformed at byte {self.pos} of {len(self.data)}: {reason}", position=self.pos
        )

    # -- reading -------------------------------------------------------------------------------------------

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes."""
        begin, end = self.pos, self.pos + length
        if length < 0 or end > len(self.data):
            raise self.malformed(f"a value of {length} bytes exceeds the end")
        self.pos = end
        return self.data[begin:end]

    def number(self, layout: struct.Struct) -> Any:
        """Return the next number."""
        value = layout.unpack_from(self.data, self.pos)[0]
        self.pos += layout.size
        return value

    def line(self) -> bytes:
        """Return the bytes up to the next newline, which is skipped: an argument of protocol 0."""
        begin = self.pos
        end = self.data.index(b"\n", begin)
        self.pos = end + 1
        return self.data[begin:end]

    # -- bounds --------------------------------------------------------------------------------------------

    def contain(self) -> None:
        """Count a new container."""
        self.containers -= 1
        if self.containers < 0:
            raise self.malformed(_TOO_MANY)

    def copy(self, length: int) -> None:
        """Count the length of a copied value."""
        self.copied -= length
        if self.copied < 0:
            raise self.malformed("it repeats shared values to many times its length")

    def key(self, key: Any) -> Any:
        """Return ``key`` or a replacement with a cheap, collision-free hash. numpy numbers and strings
        become plain, other types `Ignored`.
        """
        if isinstance(key, np.generic) and (plain := plain_key(key)) is not NO_PLAIN_KEY:
            key = plain
        pending = [key]
        for _ in range(_MAX_KEY_PARTS):
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
                    raise self.malformed(f"a {kind.__name__} cannot be a dict key")
                self.contain()
                return Ignored(getattr(item, "kind", None) or f"a {kind.__name__}")
        raise self.malformed(f"a dict key has more than {_MAX_KEY_PARTS} parts")

    # -- containers ----------------------------------------------------------------------------------------

    def pop_mark(self) -> list[Any]:
        """Return the values pushed since the last MARK."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def mark(self) -> None:
        """Execute MARK."""
        if len(self.marks) >= _MAX_MARKS:
            raise self.malformed(f"it is nested deeper than {_MAX_MARKS} levels")
        self.marks.append(self.stack)
        self.stack = []

    def push_container(self, value: Any, count: int = 1) -> None:
        """Push a new container; a large one counts as ``count`` containers."""
        self.containers -= count
        if self.containers < 0:
            raise self.malformed(_TOO_MANY)
        self.stack.append(value)

    def dict(self) -> None:
        """Execute DICT."""
        items = self.pop_mark()
        self.push_container({})
        self.set_items(items)

    def extend(self, items: list[Any]) -> None:
        """Execute APPEND and APPENDS."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Ignored):
            raise self.malformed(f"append to a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Execute SETITEMS; ``items`` are keys and values in turn."""
        target = self.stack[-1]
        if isinstance(target, Ignored):
            return
        if not isinstance(target, dict):
            raise self.malformed(f"item assignment to a {type(target).__name__}")
        if len(items) % 2:
            raise self.malformed("a dict key without a value")
        keys = [key if type(key) is str else self.key(key) for key in items[::2]]
        expected = len(target) + len(keys)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != expected:
            raise self.malformed("a dict has duplicate keys")

    def add_items(self) -> None:
        """Execute ADDITEMS."""
        items = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise self.malformed(f"set items added to a {type(target).__name__}")
        target.update(map(self.key, items))

    # -- memo ----------------------------------------------------------------------------------------------

    def put(self, number: int) -> None:
        """Execute BINPUT and LONG_BINPUT; the memo is a dict, because numbers may be huge."""
        memo = self.memo
        memo[number] = self.stack[-1]
        if len(memo) > self.memo_limit:
            raise self.malformed("it has too many memo entries for its length")

    def put_line(self) -> None:
        """Execute PUT."""
        number = int(self.line())
        if number < 0:
            raise self.malformed("a negative memo number")
        self.put(number)

    def binget(self) -> None:
        """Execute BINGET."""
        pos = self.pos
        self.stack.append(self.memo[self.data[pos]])
        self.pos = pos + 1

    def long_binget(self) -> None:
        """Execute LONG_BINGET."""
        pos = self.pos
        self.stack.append(self.memo[_UINT32.unpack_from(self.data, pos)[0]])
        self.pos = pos + 4

    # -- values --------------------------------------------------------------------------------------------

    def binint1(self) -> None:
        """Execute BININT1."""
        pos = self.pos
        self.stack.append(self.data[pos])
        self.pos = pos + 1

    def short_text(self) -> None:
        """Execute SHORT_BINUNICODE."""
        begin = self.pos + 1
        end = begin + self.data[begin - 1]
        if end > len(self.data):
            raise self.malformed("a string exceeds the end")
        self.pos = end
        self.stack.append(str(self.data[begin:end], "utf-8", "surrogatepass"))

    def quoted(self) -> None:
        """Execute STRING."""
        line = self.line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.malformed("a string without quotes")
        self.stack.append(str(codecs.escape_decode(line[1:-1])[0], "utf-8"))

    def decimal(self) -> None:
        """Execute INT, including the booleans of protocol 0."""
        line = self.line()
        fixed = {b"00": False, b"01": True}
        self.stack.append(fixed[line] if line in fixed else int(line))

    def long(self, length: int) -> None:
        """Execute LONG1 and LONG4."""
        if length > _MAX_INTEGER_BYTES:
            raise self.malformed(f"an integer of {length} bytes, more than {_MAX_INTEGER_BYTES}")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    # -- objects -------------------------------------------------------------------------------------------

    def line_global(self) -> None:
        """Execute GLOBAL."""
        module = str(self.line(), "utf-8")
        self.stack.append(self.find(module, str(self.line(), "utf-8")))

    def stack_global(self) -> None:
        """Execute STACK_GLOBAL."""
        name = self.stack.pop()
        module = self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self.malformed("a global whose name is not a string")
        self.stack.append(self.find(module, name))

    def call(self, way: Literal["reduce", "new"]) -> None:
        """Execute REDUCE and NEWOBJ."""
        args = self.stack.pop()
        function = self.stack[-1]
        if isinstance(function, Ignored):
            return
        made = getattr(function, way) if type(function) is Constructor else None
        if made is None:
            name = function.name if type(function) is Constructor else f"a {type(function).__name__}"
            raise UnsafeObjectError(
                f"the pickle calls {name}, which is not allowed; no code was run", global_name=name
            )
        if type(args) is not tuple:
            raise self.malformed("call arguments that are not a tuple")
        value = made(args)
        if type(value) in _COPIES:
            self.copy(len(value))
        self.contain()
        self.stack[-1] = value

    def new_with_names(self) -> None:
        """Execute NEWOBJ_EX."""
        if self.stack.pop() != {}:
            raise self.malformed("keyword arguments, which no class on the allow-list takes")
        self.call("new")

    def build(self) -> None:
        """Execute BUILD."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if not isinstance(instance, (Instance, BuiltDict)):
            raise UnsafeObjectError(
                f"the pickle sets the state of a {type(instance).__name__}, which is not allowed; no code "
                "was run"
            )
        instance.build(state)

    def persistent_id(self, value: Any) -> None:
        """Execute PERSID and BINPERSID."""
        if self.persistent is None:
            raise UnsafeObjectError(
                "the pickle has a persistent id, a reference to other data, which files of this format "
                "cannot have"
            )
        self.contain()
        self.stack.append(self.persistent(value))

    # -- structure -----------------------------------------------------------------------------------------

    def proto(self) -> None:
        """Execute PROTO."""
        version = self.data[self.pos]
        self.pos += 1
        if version > 5:
            raise UnsupportedFormatError(
                f"the pickle has protocol {version}, but the newest supported protocol is 5", protocol=version
            )

    def frame(self) -> None:
        """Execute FRAME, a buffering hint."""
        if self.number(_UINT64) > len(self.data) - self.pos:
            raise self.malformed("a frame exceeds the end")

    def stop(self) -> NoReturn:
        """Execute STOP."""
        raise _Stop

    def pop(self) -> None:
        """Execute POP."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def unknown(self) -> NoReturn:
        """Refuse an unknown opcode."""
        code = self.data[self.pos - 1]
        raise self.malformed(f"unknown opcode {code:#04x}")


def _refusing(what: str, error: type[CheckpointFormatError] = UnsafeObjectError) -> Handler:
    def refuse(machine: _Machine) -> NoReturn:
        raise error(f"the pickle {what}, which is not supported; no code was run")

    return refuse


def _push(value: Any) -> Handler:
    return lambda m: m.stack.append(value)


_HANDLERS: dict[bytes, Handler] = {
    pickle.PROTO: _Machine.proto,
    pickle.FRAME: _Machine.frame,
    pickle.STOP: _Machine.stop,
    pickle.MARK: _Machine.mark,
    pickle.POP: _Machine.pop,
    pickle.POP_MARK: _Machine.pop_mark,
    pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
    pickle.NONE: _push(None),
    pickle.NEWTRUE: _push(True),
    pickle.NEWFALSE: _push(False),
    pickle.INT: _Machine.decimal,
    pickle.BININT: lambda m: m.stack.append(m.number(_INT32)),
    pickle.BININT1: _Machine.binint1,
    pickle.BININT2: lambda m: m.stack.append(m.number(_UINT16)),
    pickle.LONG: lambda m: m.stack.append(int(m.line().removesuffix(b"L"))),
    pickle.LONG1: lambda m: m.long(m.take(1)[0]),
    pickle.LONG4: lambda m: m.long(m.number(_INT32)),
    pickle.FLOAT: lambda m: m.stack.append(float(m.line())),
    pickle.BINFLOAT: lambda m: m.stack.append(m.number(_DOUBLE)),
    pickle.STRING: _Machine.quoted,
    pickle.BINSTRING: lambda m: m.stack.append(str(m.take(m.number(_INT32)), "utf-8")),  # Python 2's str
    pickle.SHORT_BINSTRING: lambda m: m.stack.append(str(m.take(m.take(1)[0]), "utf-8")),
    pickle.UNICODE: lambda m: m.stack.append(str(m.line(), "raw-unicode-escape")),
    pickle.BINUNICODE: lambda m: m.stack.append(str(m.take(m.number(_UINT32)), "utf-8", "surrogatepass")),
    pickle.SHORT_BINUNICODE: _Machine.short_text,
    pickle.BINUNICODE8: lambda m: m.stack.append(str(m.take(m.number(_UINT64)), "utf-8", "surrogatepass")),
    pickle.BINBYTES: lambda m: m.stack.append(m.take(m.number(_UINT32))),
    pickle.SHORT_BINBYTES: lambda m: m.stack.append(m.take(m.take(1)[0])),
    pickle.BINBYTES8: lambda m: m.stack.append(m.take(m.number(_UINT64))),
    pickle.BYTEARRAY8: lambda m: m.stack.append(bytearray(m.take(m.number(_UINT64)))),
    pickle.EMPTY_LIST: lambda m: m.push_container([]),
    pickle.EMPTY_DICT: lambda m: m.push_container({}),
    pickle.EMPTY_TUPLE: _push(()),
    pickle.EMPTY_SET: lambda m: m.push_container(set(), 4),
    pickle.LIST: lambda m: m.push_container(m.pop_mark()),
    pickle.DICT: _Machine.dict,
    pickle.TUPLE: lambda m: m.push_container(tuple(m.pop_mark())),
    pickle.TUPLE1: lambda m: m.push_container((m.stack.pop(),)),
    pickle.TUPLE2: lambda m: m.push_container((m.stack.pop(-2), m.stack.pop())),
    pickle.TUPLE3: lambda m: m.push_container((m.stack.pop(-3), m.stack.pop(-2), m.stack.pop())),
    pickle.FROZENSET: lambda m: m.push_container(frozenset(map(m.key, m.pop_mark())), 4),
    pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.pop_mark()),
    pickle.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
    pickle.ADDITEMS: _Machine.add_items,
    pickle.MEMOIZE: lambda m: m.put(len(m.memo)),
    pickle.PUT: _Machine.put_line,
    pickle.BINPUT: lambda m: m.put(m.take(1)[0]),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(_UINT32)),
    pickle.GET: lambda m: m.stack.append(m.memo[int(m.line())]),
    pickle.BINGET: _Machine.binget,
    pickle.LONG_BINGET: _Machine.long_binget,
    pickle.GLOBAL: _Machine.line_global,
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.REDUCE: lambda m: m.call("reduce"),
    pickle.NEWOBJ: lambda m: m.call("new"),
    pickle.NEWOBJ_EX: _Machine.new_with_names,
    pickle.BUILD: _Machine.build,
    pickle.PERSID: lambda m: m.persistent_id(str(m.line(), "ascii")),
    pickle.BINPERSID: lambda m: m.persistent_id(m.stack.pop()),
    **dict.fromkeys((pickle.INST, pickle.OBJ), _refusing("uses the opcodes INST or OBJ")),
    **dict.fromkeys((pickle.EXT1, pickle.EXT2, pickle.EXT4), _refusing("uses the extension registry")),
    **dict.fromkeys(
        (pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
        _refusing("has out-of-band buffers", UnsupportedFormatError),
    ),
}
_TABLE = [_HANDLERS.get(bytes([code]), _Machine.unknown) for code in range(256)]
