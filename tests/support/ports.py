"""Ports of loopback: for programs that bind them later, and such on which nobody listens, now or later."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Final

__all__ = ["free_port", "refusing_port"]

_PORTS: Final = range(10_000, 15_000)  # those which the kernel gives to outgoing connections are higher
_claims: Final[list[socket.socket]] = []


def free_port() -> int:
    """A port that nobody listens on, and that no other process of tests gets while this one lives."""
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
    """A port at which connections are refused for as long as the block lasts: it is bound, and nobody's to
    listen on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
