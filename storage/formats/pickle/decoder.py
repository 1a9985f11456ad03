"""Reads pickles without running them: an interpreter of pickle opcodes in which names have no power.

Nothing is imported and no attribute is looked up by a name from the file. A global is what the caller's
``find`` returns for its module and name: an inert value, or a `Constructor`, the only thing REDUCE and
NEWOBJ call. BUILD works on an `Instance` alone and merely keeps the state. The opcodes are those of protocols
0 to 5, specified in the standard library's `pickletools`; object loading by INST and OBJ, the extension
registry and out-of-band buffers are refused: neither Python 3 nor torch writes them for checkpoints.

Work and memory are linear in the length of the pickle (see `dcp.storage.formats.pickle.machine`). The result
may still be a deep, shared or self-referring structure made of few bytes: who walks it must bound the walk.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from dcp.storage.formats.pickle.machine import DOUBLE, INT32, UINT16, UINT32, UINT64, Handler, Machine
from dcp.storage.formats.pickle.values import (
    BuiltDict,
    Constructor,
    Find,
    Ignored,
    Instance,
    Limits,
    allow_list,
    instances,
)

__all__ = [
    "BuiltDict",
    "Constructor",
    "Find",
    "Ignored",
    "Instance",
    "Limits",
    "allow_list",
    "decode_pickle",
    "instances",
]


def decode_pickle(
    data: bytes | bytearray | memoryview,
    *,
    find: Find,
    persistent_load: Callable[[Any], Any] | None = None,
    limits: Limits | None = None,
) -> Any:
    """The value of one pickle that fills ``data``, with globals as ``find`` gives them.

    Raises UnsafeObjectError for a global, call or persistent id that the caller did not allow,
    UnsupportedFormatError for protocols above 5 and out-of-band buffers, CheckpointFormatError for whatever
    else no pickler writes: truncated, malformed, trailing bytes, a key twice in one dict, above the limits.
    """
    return Machine(bytes(data), find, persistent_load, limits or Limits()).run(_TABLE)


def _push(value: Any) -> Handler:
    return lambda m: m.stack.append(value)


_HANDLERS: dict[bytes, Handler] = {
    pickle.PROTO: Machine.proto,
    pickle.FRAME: Machine.frame,
    pickle.STOP: Machine.stop,
    pickle.MARK: Machine.mark,
    pickle.POP: Machine.pop,
    pickle.POP_MARK: Machine.pop_mark,
    pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
    pickle.NONE: _push(None),
    pickle.NEWTRUE: _push(True),
    pickle.NEWFALSE: _push(False),
    pickle.INT: Machine.decimal,
    pickle.BININT: lambda m: m.stack.append(m.number(INT32)),
    pickle.BININT1: Machine.binint1,
    pickle.BININT2: lambda m: m.stack.append(m.number(UINT16)),
    pickle.LONG: lambda m: m.stack.append(int(m.line().removesuffix(b"L"))),
    pickle.LONG1: lambda m: m.long(m.take(1)[0]),
    pickle.LONG4: lambda m: m.long(m.number(INT32)),
    pickle.FLOAT: lambda m: m.stack.append(float(m.line())),
    pickle.BINFLOAT: lambda m: m.stack.append(m.number(DOUBLE)),
    pickle.STRING: Machine.quoted,
    pickle.BINSTRING: lambda m: m.old_text(m.number(INT32)),
    pickle.SHORT_BINSTRING: lambda m: m.old_text(m.take(1)[0]),
    pickle.UNICODE: lambda m: m.stack.append(str(m.line(), "raw-unicode-escape")),
    pickle.BINUNICODE: lambda m: m.text(m.number(UINT32)),
    pickle.SHORT_BINUNICODE: Machine.short_text,
    pickle.BINUNICODE8: lambda m: m.text(m.number(UINT64)),
    pickle.BINBYTES: lambda m: m.binary(m.number(UINT32)),
    pickle.SHORT_BINBYTES: lambda m: m.binary(m.take(1)[0]),
    pickle.BINBYTES8: lambda m: m.binary(m.number(UINT64)),
    pickle.BYTEARRAY8: lambda m: m.stack.append(bytearray(m.take(m.number(UINT64)))),
    pickle.EMPTY_LIST: lambda m: m.push_container([]),
    pickle.EMPTY_DICT: lambda m: m.push_container({}),
    pickle.EMPTY_TUPLE: _push(()),
    pickle.EMPTY_SET: Machine.empty_set,
    pickle.LIST: lambda m: m.push_container(m.pop_mark()),
    pickle.DICT: Machine.dict,
    pickle.TUPLE: lambda m: m.push_container(tuple(m.pop_mark())),
    pickle.TUPLE1: Machine.tuple1,
    pickle.TUPLE2: Machine.tuple2,
    pickle.TUPLE3: Machine.tuple3,
    pickle.FROZENSET: Machine.frozenset,
    pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.pop_mark()),
    pickle.SETITEM: Machine.set_item,
    pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
    pickle.ADDITEMS: Machine.add_items,
    pickle.MEMOIZE: Machine.memoize,
    pickle.PUT: Machine.put_line,
    pickle.BINPUT: lambda m: m.put(m.take(1)[0]),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(UINT32)),
    pickle.GET: lambda m: m.stack.append(m.memo[int(m.line())]),
    pickle.BINGET: Machine.binget,
    pickle.LONG_BINGET: Machine.long_binget,
    pickle.GLOBAL: Machine.line_global,
    pickle.STACK_GLOBAL: Machine.stack_global,
    pickle.REDUCE: Machine.reduce,
    pickle.NEWOBJ: Machine.new,
    pickle.NEWOBJ_EX: Machine.new_with_names,
    pickle.BUILD: Machine.build,
    pickle.PERSID: lambda m: m.persistent_id(str(m.line(), "ascii")),
    pickle.BINPERSID: lambda m: m.persistent_id(m.stack.pop()),
    pickle.INST: Machine.foreign_object,
    pickle.OBJ: Machine.foreign_object,
    pickle.EXT1: Machine.extension,
    pickle.EXT2: Machine.extension,
    pickle.EXT4: Machine.extension,
    pickle.NEXT_BUFFER: Machine.buffer,
    pickle.READONLY_BUFFER: Machine.buffer,
}
_TABLE = [_HANDLERS.get(bytes([code]), Machine.unknown) for code in range(256)]
