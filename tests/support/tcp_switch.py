"""A plain TCP relay on loopback that can be switched off and on: a server that goes away and comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

from tests.support.ports import free_port

__all__ = ["TcpSwitch"]

_PIECE_BYTES = 1 << 16
_ACCEPT_SECONDS = 0.2


class TcpSwitch:
    """Relays ``127.0.0.1:port`` to ``target_port`` while it is on; a context manager, which begins on.

    `off` closes all connections and the listening socket, so that new ones are refused; `on` listens on the
    same port again.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = free_port()  # nobody else's while it is off

    def on(self) -> None:
        """Relay."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        listener.settimeout(_ACCEPT_SECONDS)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="tcp-switch", daemon=True).start()

    def off(self) -> None:
        """Refuse, and cut what is connected."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # also of a thread that waits for a connection
            listener.close()
        with self._lock:
            cut, self._open = self._open, set()
        for connection in cut:
            _cut(connection)

    def __enter__(self) -> Self:
        self.on()
        return self

    def __exit__(self, *_: object) -> None:
        self.off()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed by `off`
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=10)
            except OSError:
                _cut(client)
                continue
            server.settimeout(None)
            client.settimeout(None)
            with self._lock:
                if self._listener is not listener:
                    _cut(client)
                    _cut(server)
                    return
                self._open |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._relay, args=(source, target), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                target.sendall(piece)
        with self._lock:
            self._open -= {source, target}
        _cut(source)
        _cut(target)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
