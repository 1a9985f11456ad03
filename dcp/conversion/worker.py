"""The process that carries out tasks for `LocalProcesses`: pickles in, pickles out, no torch.

It is started as a module of its own, so that the program of the caller is not imported a second time.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import traceback
from typing import IO, Any, Final

__all__ = ["imported_modules", "receive", "send", "serve"]

_LENGTH: Final = struct.Struct("<Q")


def send(stream: IO[bytes], message: object) -> None:
    """One message, whole."""
    data = pickle.dumps(message, protocol=5)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> object:
    """The next message; EOFError at the end of the stream, or if it ends within one."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def imported_modules() -> list[str]:
    """What this process has imported: that no torch is among it can be asked of each."""
    return list(sys.modules)


def serve() -> None:
    """Calls from stdin until it ends; (True, result) or (False, exception) to what was stdout."""
    # What a library prints must not get between the messages.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = sys.stdin.buffer
    while True:
        try:
            call: Any = receive(calls)
        except EOFError:
            return
        function, args = call
        try:
            answer: tuple[bool, object] = True, function(*args)
        except Exception as error:  # noqa: BLE001 - raised by whoever asked
            error.add_note("In a process of the conversion:\n" + traceback.format_exc())
            answer = False, error
        try:
            send(answers, answer)
        except BrokenPipeError:  # the parent is gone
            return


if __name__ == "__main__":
    serve()
