"""The process that carries out tasks for `LocalProcesses`: pickles in, pickles out, no torch.

It is started as a module of its own, so that the program of the caller is not imported a second time.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from types import FrameType
from typing import IO, Final, NoReturn

__all__ = ["END", "receive", "send", "serve"]

_LENGTH: Final = struct.Struct("<Q")
END: Final = _LENGTH.pack(0)
"""After the last message: the stream itself does not end while a fork of the sender holds it open."""


def send(stream: IO[bytes], message: object) -> None:
    """One message, whole."""
    data = pickle.dumps(message, protocol=5)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> object:
    """The next message; EOFError at `END` or that of the stream, or if it ends within one."""
    return pickle.loads(_receive_bytes(stream))


def _receive_bytes(stream: IO[bytes]) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    if not length:
        raise EOFError
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def serve() -> None:
    """Calls from stdin until its end; (True, result) or (False, exception) to what was stdout.

    On SIGTERM, and when stdin ends while a call runs, because the parent is gone, the call is broken off;
    what it writes to a store is taken back.
    """
    signal.signal(signal.SIGTERM, _leave)
    # What a library prints must not get between the messages.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    is_busy = threading.Event()
    threading.Thread(target=_listen, args=(calls, is_busy), daemon=True).start()
    while (call := calls.get()) is not None:
        is_busy.set()
        answer = _answer(call)
        is_busy.clear()
        try:
            send(answers, answer)
        except BrokenPipeError:  # the parent is gone
            return


def _answer(call: bytes) -> tuple[bool, object]:
    function, args = pickle.loads(call)
    try:
        return True, function(*args)
    except Exception as error:  # noqa: BLE001 - raised by whoever asked
        error.add_note("In a process of the conversion:\n" + traceback.format_exc())
        return False, error


def _listen(calls: queue.SimpleQueue[bytes | None], is_busy: threading.Event) -> None:
    """In a thread, so that the end of stdin is noticed during a call."""
    # Not sys.stdin, whose lock this thread would hold when the interpreter ends.
    stream = os.fdopen(os.dup(0), "rb")
    try:
        while True:
            calls.put(_receive_bytes(stream))
    except EOFError:
        pass
    finally:
        calls.put(None)
    if is_busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: not in the midst of taking back what was written
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    serve()
