"""An ASGI application on a real socket of this process, for tests of streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

__all__ = ["listening"]

_HANG_SECONDS = 60.0


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Yield the URL of the application, on a free port of the loopback interface."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        end = time.monotonic() + _HANG_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server does not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(_HANG_SECONDS)
        assert not thread.is_alive(), "the server does not stop"
