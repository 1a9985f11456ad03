"""The link between a trainer and its writer process: messages over a Unix socket of packets. No torch.

A packet is a map of plain data, packed by msgpack, with file descriptors beside it. A long one goes into a
memory file of which only the descriptor travels, so that sending never waits for the receiver to read: what
was sent is the kernel's, and outlives the sender.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

LOOPBACK = "127.0.0.1"

_IN_MEMORY = b"\0"
"""The packet whose body is in the last descriptor; no map is packed to this byte."""

_INLINE_BYTES = 16 << 10
_LONGEST_BYTES = 1 << 20
"""Of a packet; the kernel's own limit is lower."""
_MOST_FDS = 16
_SEND_SECONDS = 10
"""Time that a send may wait for room: then the receiver has stopped reading, and is as good as dead."""


class Connection:
    """One end. Any thread may send, one receives.

    ``peer`` is a descriptor that is readable once the process at the other end has ended (-1 for none). It
    shows that also where a fork of that process still holds the socket open. The connection owns ``sock`` and
    ``peer``.
    """

    def __init__(self, sock: socket.socket, peer: int = -1) -> None:
        self._sock = sock
        self._peer = peer
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if peer >= 0:
            self._poll.register(peer, select.POLLIN)

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send; the descriptors are duplicated, not taken. Raises OSError where the other end is gone."""
        data = msgpack.packb(body, unicode_errors="surrogatepass")
        memory = -1
        if len(data) > _INLINE_BYTES:
            with contextlib.suppress(OSError):  # too many open files: it may fit into a packet
                memory = os.memfd_create("dcp-message", os.MFD_CLOEXEC)
        if memory < 0:
            socket.send_fds(self._sock, [data], fds)
            return
        with os.fdopen(memory, "wb") as file:
            file.write(data)
            file.flush()
            socket.send_fds(self._sock, [_IN_MEMORY], [*fds, memory])

    def offer(self, body: Mapping[str, Any]) -> None:
        """Send something short that may be lost: it is dropped where it would have to wait."""
        with contextlib.suppress(OSError):
            self._sock.send(msgpack.packb(body), socket.MSG_DONTWAIT)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Receive the next message, and its descriptors, to be closed; None once the other end is gone and
        all that it sent has been received."""
        own = self._sock.fileno()
        # what it sent before it died may have come between the two looks
        if own not in dict(self._poll.poll()) and own not in dict(self._poll.poll(0)):
            return None
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._sock, _LONGEST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it ended with something unread; what it had sent is behind this error
            return self.receive()
        if not data:
            return None
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise OSError("file descriptors were sent that did not arrive: too many open files")
        if data == _IN_MEMORY:
            with os.fdopen(fds.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False), fds

    def close(self) -> None:
        """Close the socket; the other end sees the end."""
        self._sock.close()
        if self._peer >= 0:
            os.close(self._peer)
            self._peer = -1


def watch_process(pid: int) -> int:
    """Open a pidfd of a process, for `Connection`; -1 where there are none (Linux before 5.3, seccomp)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
