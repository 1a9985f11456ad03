"""The link between a trainer and its writer process: messages over a Unix socket of packets, and the process
as its trainer sees it. Imports no torch.

A packet is a map of plain data, packed by msgpack, with file descriptors beside it. A long one goes into a
memory file of which only the descriptor travels, so that sending never waits for the receiver to read: what
was sent is the kernel's, and outlives the sender.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from dcp.version import __version__

logger = logging.getLogger(__name__)

_IN_MEMORY = b"\0"
"""The packet whose body is in the last descriptor; no map is packed to this byte."""

_INLINE_BYTES = 16 << 10
_LONGEST_BYTES = 1 << 20
"""Of a packet; the kernel's own limit is lower."""
_MOST_FDS = 16
_SEND_SECONDS = 10
"""Time that a send may wait for room: then the receiver has stopped reading, and is as good as dead."""
_REAP_SECONDS = 5.0

_ENDED = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""Errors of sending to a process that has ended."""

_DROPPED = ("TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would tie the writers' group to the trainers' launcher."""

_SET = {
    # the cores are the training's
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # staged copies are host memory: no memory of a device is spent on a context here
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}


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


def watch_parent(pid: int) -> int:
    """Watch, as `watch_process` does, the process ``pid`` that has started this one, and may have ended
    since: its id may be another's by now."""
    peer = watch_process(pid)
    if os.getppid() == pid:
        return peer
    if peer >= 0:
        os.close(peer)
    return os.eventfd(1)  # readable, as the pidfd of a process that has ended


class Child:
    """Starts a writer process in a session of its own; never raises: a process that cannot start has ended.
    ``arguments`` are its rank, the world size, and the timeout in seconds.

    ``on_message`` gets what it says and ``on_end`` is called once when it has ended, both in a thread of this
    object. ``end`` then says how it ended, as the rest of a sentence; it is empty before.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        on_message: Callable[[Any, dict[str, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self.end = ""
        self._on_message, self._on_end = on_message, on_end
        self._killed_because = ""
        self._ended = threading.Event()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = _start(theirs.fileno(), arguments)
            except OSError as error:
                ours.close()
                self._note_end(f"could not be started: {error}")
                return
        self._connection = Connection(ours, watch_process(self._process.pid))
        threading.Thread(target=self._receive, name="dcp-writer-watch", daemon=True).start()

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send it a message; one that has ended, or does not take messages any more, shows by its ``end``."""
        if self.end:
            return
        try:
            self._connection.send(body, fds)
        except BlockingIOError:
            self.kill("did not take messages any more and was killed")
        except OSError as error:
            if error.errno not in _ENDED:  # its save would never be heard to end
                self.kill(f"could not be sent a message and was killed: {error}")

    def kill(self, because: str) -> None:
        """Send SIGKILL; ``because`` becomes its ``end``."""
        if not self.end:
            self._killed_because = because
            self._process.kill()

    def close(self, timeout_seconds: float) -> None:
        """Have it end, by itself if it does so in time."""
        self.send({"kind": "close"})
        if not self._ended.wait(timeout_seconds):
            self.kill("did not end when it was asked to, and was killed")
            self._ended.wait(_REAP_SECONDS)

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                body, fds = message
                for fd in fds:
                    os.close(fd)
                self._on_message(self, body)
        except Exception as error:
            logger.exception("a message of writer process %d", self._process.pid)
            self.kill(f"could not be understood and was killed: {type(error).__name__}: {error}")
        try:
            status = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # the connection is closed: it has no business any more
            self._process.kill()
            status = self._process.wait()
        self._connection.close()  # before `on_end`, which may look for what is still open
        self._note_end(self._killed_because or _end_of(status))

    def _note_end(self, end: str) -> None:
        self.end = end
        self._ended.set()
        self._on_end()


def _start(fd: int, arguments: Sequence[object]) -> subprocess.Popen[bytes]:
    """Start the process, in the trainer's environment without what ties a process to its launcher, with the
    trainer's module search path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]  # noqa: PTH100 - "" is cwd
    # -P: a folder that training happens to run in must not provide modules that it does not provide there
    command = [sys.executable or "", "-P", "-m", "dcp.background.main"]
    return subprocess.Popen(
        [*command, *map(str, (fd, os.getpid(), __version__, *arguments))],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,  # else Ctrl-C and the launcher's signals to the trainer's group reach it
        env=kept | _SET | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
    )


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status} (see its messages on stderr)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
