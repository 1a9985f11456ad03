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

from dcp.storage.formats.pickle.machine import DOUBLE, INT32, UINT16, UINT32, UINT64, Handler, PickleMachine
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
    return PickleMachine(bytes(data), find, persistent_load, limits or Limits()).run(_TABLE)


def _push(value: Any) -> Handler:
    return lambda m: m.stack.append(value)


_HANDLERS: dict[bytes, Handler] = {
    pickle.PROTO: PickleMachine.proto,
    pickle.FRAME: PickleMachine.frame,
    pickle.STOP: PickleMachine.stop,
    pickle.MARK: PickleMachine.mark,
    pickle.POP: PickleMachine.pop,
    pickle.POP_MARK: PickleMachine.pop_mark,
    pickle.DUP: lambda m: m.stack.append(m.stack[-1]),
    pickle.NONE: _push(None),
    pickle.NEWTRUE: _push(True),
    pickle.NEWFALSE: _push(False),
    pickle.INT: PickleMachine.decimal,
    pickle.BININT: lambda m: m.stack.append(m.number(INT32)),
    pickle.BININT1: PickleMachine.binint1,
    pickle.BININT2: lambda m: m.stack.append(m.number(UINT16)),
    pickle.LONG: lambda m: m.stack.append(int(m.line().removesuffix(b"L"))),
    pickle.LONG1: lambda m: m.long(m.take(1)[0]),
    pickle.LONG4: lambda m: m.long(m.number(INT32)),
    pickle.FLOAT: lambda m: m.stack.append(float(m.line())),
    pickle.BINFLOAT: lambda m: m.stack.append(m.number(DOUBLE)),
    pickle.STRING: PickleMachine.quoted,
    pickle.BINSTRING: lambda m: m.old_text(m.number(INT32)),
    pickle.SHORT_BINSTRING: lambda m: m.old_text(m.take(1)[0]),
    pickle.UNICODE: lambda m: m.stack.append(str(m.line(), "raw-unicode-escape")),
    pickle.BINUNICODE: lambda m: m.text(m.number(UINT32)),
    pickle.SHORT_BINUNICODE: PickleMachine.short_text,
    pickle.BINUNICODE8: lambda m: m.text(m.number(UINT64)),
    pickle.BINBYTES: lambda m: m.binary(m.number(UINT32)),
    pickle.SHORT_BINBYTES: lambda m: m.binary(m.take(1)[0]),
    pickle.BINBYTES8: lambda m: m.binary(m.number(UINT64)),
    pickle.BYTEARRAY8: lambda m: m.stack.append(bytearray(m.take(m.number(UINT64)))),
    pickle.EMPTY_LIST: lambda m: m.push_container([]),
    pickle.EMPTY_DICT: lambda m: m.push_container({}),
    pickle.EMPTY_TUPLE: _push(()),
    pickle.EMPTY_SET: PickleMachine.empty_set,
    pickle.LIST: lambda m: m.push_container(m.pop_mark()),
    pickle.DICT: PickleMachine.dict,
    pickle.TUPLE: lambda m: m.push_container(tuple(m.pop_mark())),
    pickle.TUPLE1: PickleMachine.tuple1,
    pickle.TUPLE2: PickleMachine.tuple2,
    pickle.TUPLE3: PickleMachine.tuple3,
    pickle.FROZENSET: PickleMachine.frozenset,
    pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.pop_mark()),
    pickle.SETITEM: PickleMachine.set_item,
    pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
    pickle.ADDITEMS: PickleMachine.add_items,
    pickle.MEMOIZE: PickleMachine.memoize,
    pickle.PUT: PickleMachine.put_line,
    pickle.BINPUT: lambda m: m.put(m.take(1)[0]),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(UINT32)),
    pickle.GET: lambda m: m.stack.append(m.memo[int(m.line())]),
    pickle.BINGET: PickleMachine.binget,
    pickle.LONG_BINGET: PickleMachine.long_binget,
    pickle.GLOBAL: PickleMachine.line_global,
    pickle.STACK_GLOBAL: PickleMachine.stack_global,
    pickle.REDUCE: PickleMachine.reduce,
    pickle.NEWOBJ: PickleMachine.new,
    pickle.NEWOBJ_EX: PickleMachine.new_with_names,
    pickle.BUILD: PickleMachine.build,
    pickle.PERSID: lambda m: m.persistent_id(str(m.line(), "ascii")),
    pickle.BINPERSID: lambda m: m.persistent_id(m.stack.pop()),
    pickle.INST: PickleMachine.foreign_object,
    pickle.OBJ: PickleMachine.foreign_object,
    pickle.EXT1: PickleMachine.extension,
    pickle.EXT2: PickleMachine.extension,
    pickle.EXT4: PickleMachine.extension,
    pickle.NEXT_BUFFER: PickleMachine.buffer,
    pickle.READONLY_BUFFER: PickleMachine.buffer,
}
_TABLE = [_HANDLERS.get(bytes([code]), PickleMachine.unknown) for code in range(256)]
