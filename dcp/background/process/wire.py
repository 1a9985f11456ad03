"""Messages between a trainer and its writer process: maps of plain data over a Unix stream socket.

A frame is a header, a msgpack body, and file descriptors beside it. A long body goes into a memory file of
which only the descriptor travels, so that sending never waits for the receiver to read: what was sent is the
kernel's, and outlives the sender.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

__all__ = ["Connection", "Message", "watch_parent", "watch_process"]

_HEADER = struct.Struct("<QBB")
"""Length of the body; 1 if the body is in the last descriptor; number of descriptors."""

_INLINE_BYTES = 16 << 10
_MOST_FDS = 16
_SEND_SECONDS = 10
"""Time that a send may wait for room: then the receiver has stopped reading, and is as good as dead."""


class Message(NamedTuple):
    """A received message; the descriptors are the receiver's to close."""

    body: dict[str, Any]
    fds: list[int]


class Connection:
    """One end. Any thread may send, one receives.

    ``peer`` is what `watch_process` or `watch_parent` gives for the process at the other end (-1 for none).
    It tells of that process's end also where a fork of it still holds the socket open. The connection owns
    ``sock`` and ``peer``.
    """

    def __init__(self, sock: socket.socket, peer: int = -1) -> None:
        self._sock = sock
        self._peer = peer
        self._sending = threading.Lock()
        bound = struct.pack("@ll", _SEND_SECONDS, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if peer >= 0:
            self._poll.register(peer, select.POLLIN)

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send; the descriptors are duplicated, not taken. Raises OSError where nobody can receive any
        more."""
        data = msgpack.packb(body, unicode_errors="surrogatepass")
        if len(data) <= _INLINE_BYTES:
            self._send(_HEADER.pack(len(data), 0, len(fds)) + data, fds)
            return
        try:
            memory = os.memfd_create("dcp-message", os.MFD_CLOEXEC)
        except OSError:  # too many open files: better to wait for the receiver than not to be heard
            self._send(_HEADER.pack(len(data), 0, len(fds)) + data, fds)
            return
        with os.fdopen(memory, "wb") as file:
            file.write(data)
            file.flush()
            self._send(_HEADER.pack(len(data), 1, len(fds) + 1), [*fds, memory])

    def offer(self, body: Mapping[str, Any]) -> None:
        """Send something short that may be lost: it is dropped where it would have to wait."""
        data = msgpack.packb(body)
        with self._sending, contextlib.suppress(OSError):
            self._sock.send(_HEADER.pack(len(data), 0, 0) + data, socket.MSG_DONTWAIT)

    def receive(self) -> Message | None:
        """The next message; None once the other end is gone and all that it sent has been received."""
        header, fds = self._read(_HEADER.size, with_fds=True)
        if len(header) < _HEADER.size:
            _close(fds)
            return None
        length, in_memory, count = _HEADER.unpack(header)
        if len(fds) != count:
            _close(fds)
            raise OSError(f"{count} file descriptors were sent, {len(fds)} arrived: too many open files")
        if in_memory:
            with os.fdopen(fds.pop(), "rb") as file:
                file.seek(0)
                data = file.read(length)  # in several calls, where one does not move that much
        else:
            data, _ = self._read(length, with_fds=False)
        if len(data) < length:
            _close(fds)
            return None
        return Message(msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False), fds)

    def close(self) -> None:
        """Close the socket; the other end sees the end."""
        self._sock.close()
        if self._peer >= 0:
            os.close(self._peer)
            self._peer = -1

    def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        with self._sending:
            sent = socket.send_fds(self._sock, [frame], fds) if fds else self._sock.send(frame)
            while sent < len(frame):
                sent += self._sock.send(frame[sent:])

    def _read(self, size: int, *, with_fds: bool) -> tuple[bytes, list[int]]:
        """``size`` bytes, or fewer at the end of the connection."""
        data, fds = bytearray(), list[int]()
        while len(data) < size and self._readable():
            try:
                if with_fds:
                    part, new, _, _ = socket.recv_fds(
                        self._sock, size - len(data), _MOST_FDS, socket.MSG_CMSG_CLOEXEC
                    )
                    fds += new
                else:
                    part = self._sock.recv(size - len(data))
            except ConnectionResetError:  # ended with something of ours unread
                break
            if not part:
                break
            data += part
        return bytes(data), fds

    def _readable(self) -> bool:
        """Wait for bytes or the end; False if the other process is gone and there is nothing more to read."""
        ready = dict(self._poll.poll())
        if self._sock.fileno() in ready:
            return True
        # what it sent before it died may have come between the two looks
        return any(fd == self._sock.fileno() for fd, _ in self._poll.poll(0))


def watch_process(pid: int) -> int:
    """A pidfd of a process, for `Connection`; -1 where there are none (Linux before 5.3, seccomp)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def watch_parent(pid: int) -> int:
    """`watch_process` of the process ``pid`` that has started this one, and may have ended since: its id may
    be another's by now."""
    peer = watch_process(pid)
    if os.getppid() == pid:
        return peer
    if peer >= 0:
        os.close(peer)
    return os.eventfd(1)  # readable, as the pidfd of a process that has ended


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
