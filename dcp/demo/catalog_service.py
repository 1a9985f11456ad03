"""`dcp serve` for the demo: as a user runs it, with no settings but a free port, and ended again."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Self

from dcp.demo.jobs import DemoError, environ_of, import_path, start_dcp
from dcp.demo.places import FolderPlace, Place

__all__ = ["ROOT_NAME", "CatalogService"]

ROOT_NAME: Final = "checkpoints"
_READY_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 60.0
_SHOWN_LOG_LINES: Final = 20
_START_ATTEMPTS: Final = 3


class CatalogService:
    """The service over all checkpoints of the demo, its database in ``folder``; a context manager.

    ``folder`` holds the folder ``checkpoints``, which the service takes by itself; of a bucket it is told.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self.url = ""
        self.ready_seconds = 0.0
        self._folder = folder
        self._log = folder / "logs" / "catalog.txt"
        own = {**place.environment, "PYTHONPATH": os.pathsep.join(import_path())}
        self._environment = {
            name: value for name, value in environ_of(own).items() if not name.startswith("DCP_SERVER_")
        }
        if not isinstance(place, FolderPlace):
            self._environment["DCP_SERVER_ROOTS"] = json.dumps(
                {ROOT_NAME: {"url": place.root("").rstrip("/")}}
            )
        self._process: BaseProcess | None = None

    def __enter__(self) -> Self:
        begun = time.monotonic()
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start()
                break
            except DemoError:  # another process may have taken the port meanwhile
                if attempt == _START_ATTEMPTS or "is taken" not in self._tail():
                    raise
        self.ready_seconds = time.monotonic() - begun
        return self

    def _start(self) -> None:
        begun = time.monotonic()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            command = ("serve", "--port", str(port))
            self._process = start_dcp(command, self._folder, self._environment, log.fileno())
        try:
            while not self._is_ready():
                if not self._process.is_alive() or time.monotonic() - begun > _READY_SECONDS:
                    raise DemoError(f"dcp serve is not ready:\n{self._tail()}")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> int | None:
        """Until it ends by itself, or Ctrl-C ends both (KeyboardInterrupt)."""
        if self._process is None:
            return None
        self._process.join()
        return self._process.exitcode

    def stop(self) -> int | None:
        """End it in good order; its exit status, None if it had to be killed. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        process.join(_STOP_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None
        return process.exitcode

    def _is_ready(self) -> bool:
        # no proxy is asked for what is on this machine
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:])


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
