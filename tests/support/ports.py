"""Loopback ports: free ports for programs that bind them later, and ports that refuse connections."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Final

__all__ = ["free_port", "refusing_port"]

_PORTS: Final = range(10_000, 15_000)  # the kernel gives higher ports to outgoing connections
_claims: Final[list[socket.socket]] = []


def free_port() -> int:
    """Return a port without a listener, reserved for this test process as long as it lives."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            claim = stack.enter_context(socket.socket(socket.AF_UNIX))
            claim.bind(f"\0dcp-tests-port-{port}")
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _claims.append(claim.dup())
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port that refuses connections during the block: bound, but without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
