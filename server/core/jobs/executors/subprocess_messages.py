"""Messages between a worker and its subprocesses: JSON with its length before it, on a stream socket.

What comes out of a subprocess is data only: it has read files from anywhere, so it is never unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dcp.server.core.jobs.ledger.states import Json, Phase

__all__ = ["Messages", "Order", "receive_message", "send_message"]

_LENGTH: Final = struct.Struct("<I")
_MAX_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order for a subprocess, as plain data."""

    kind: str
    phase: Phase
    job_id: int
    attempt_name: str
    task_number: int | None = None
    params: Json = field(default_factory=dict)
    prepared: Json = field(default_factory=dict)
    payload: Json = field(default_factory=dict)
    plan_data: Json = field(default_factory=dict)
    results: tuple[Json, ...] = ()
    memory_bytes: int = 0
    seconds: float = 0.0
    work_folder: str = ""  # set by the executor

    def document(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Order:
        """The inverse of `document`."""
        values = dict(document)
        values["results"] = tuple(values["results"])
        return cls(**values)


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """All of it. Raises ValueError or TypeError for what is no JSON, before anything is sent."""
    data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is more than a subprocess may send")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """The next one; EOFError at the end, or if it ends within one."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(connection, length))
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _MAX_BYTES))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


class Messages:
    """Messages that have arrived on a socket so far, without waiting for more."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(whole messages, whether more may come). Raises ValueError for what is no message."""
        is_open = True
        while True:
            try:
                part = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                is_open = False
                break
            self._data += part
        return self._whole(), is_open

    def _whole(self) -> list[dict[str, Any]]:
        found = []
        place = 0
        while len(self._data) - place >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, place)
            if length > _MAX_BYTES:
                raise ValueError("a message is longer than any may be")
            end = place + _LENGTH.size + length
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[place + _LENGTH.size : end]))
            place = end
        del self._data[:place]
        return found
