"""Connection of a trainer and its writer process: messages over a Unix packet socket. Does not import torch.

A packet is a msgpack map with file descriptors. A long packet is sent as the descriptor of a memory file. A
send does not wait for the receiver to read, and sent packets outlive the sender.
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
"""First byte of a packet whose body is in the memory file of the last descriptor; no msgpack map begins so.
"""

_INLINE_BYTES = 16 << 10
_LONGEST_BYTES = 1 << 20
"""Largest packet to receive; the kernel's limit is lower."""
_MOST_FDS = 16
_SEND_SECONDS = 10
"""Longest wait for buffer space; a receiver that stopped reading counts as dead."""


class Connection:
    """One end of a connection. Any thread may send; one thread receives.

    ``peer`` is a descriptor that becomes readable when the other process ends (-1 for none), also if a fork
    of that process holds the socket open. The connection owns ``sock`` and ``peer``.
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
        """Send; the descriptors are duplicated, not taken. Raises OSError if the other end is closed."""
        data = msgpack.packb(body, unicode_errors="surrogatepass")
        memory = -1
        if len(data) > _INLINE_BYTES:
            with contextlib.suppress(OSError):  # too many open files: send as a packet
                memory = os.memfd_create("dcp-message", os.MFD_CLOEXEC)
        if memory < 0:
            socket.send_fds(self._sock, [data], fds)
            return
        with os.fdopen(memory, "wb") as file:
            file.write(data)
            file.flush()
            socket.send_fds(self._sock, [_IN_MEMORY], [*fds, memory])

    def offer(self, body: Mapping[str, Any]) -> None:
        """Send a short message, or drop it if sending would wait."""
        with contextlib.suppress(OSError):
            self._sock.send(msgpack.packb(body), socket.MSG_DONTWAIT)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message with its descriptors, which the caller closes; None after the end of the
        other process.
        """
        own = self._sock.fileno()
        # a last message may have arrived since the first check
        if own not in dict(self._poll.poll()) and own not in dict(self._poll.poll(0)):
            return None
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._sock, _LONGEST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the peer died with unread messages; its own can be read
            return self.receive()
        if not data:
            return None
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise OSError("file descriptors were lost in transit: too many open files; raise ulimit -n")
        if data == _IN_MEMORY:
            with os.fdopen(fds.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False), fds

    def close(self) -> None:
        """Close the socket; the other end sees the end of the connection."""
        self._sock.close()
        if self._peer >= 0:
            os.close(self._peer)
            self._peer = -1


def watch_process(pid: int) -> int:
    """Open a pidfd for `Connection`; -1 if unsupported (Linux before 5.3, seccomp)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
