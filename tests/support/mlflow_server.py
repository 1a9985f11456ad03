"""A real MLflow server on loopback, behind a bearer-token check like a company's proxy."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final, Self

import httpx

from tests.support.ports import free_port
from tests.support.programs import Program

__all__ = ["MlflowServer"]

_READY_SECONDS: Final = 120.0
_CODE: Final = """
import os
from mlflow.server import app
from werkzeug.serving import make_server

def guarded(environ, start_response):
    if environ.get("HTTP_AUTHORIZATION") != "Bearer " + os.environ["TOKEN"]:
        start_response("401 Unauthorized", [("Content-Length", "0")])
        return [b""]
    return app(environ, start_response)

make_server("127.0.0.1", int(os.environ["PORT"]), guarded, threaded=True).serve_forever()
"""


class MlflowServer:
    """``with MlflowServer(folder) as server``: a server at ``url`` with ``token``; its data is in
    ``folder``."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._program: Program | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.folder}/mlflow.sqlite",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(self.folder / "artifacts"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TOKEN": self.token,
            "PORT": str(self.port),
        }
        with (self.folder / "log").open("ab") as log:
            options: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": subprocess.STDOUT,
            }
            environment = {**os.environ, **settings}
            self._program = Program(
                "-c", _CODE, cwd=self.folder, env=environment, ends_with_parent=True, **options
            )
        until = time.monotonic() + _READY_SECONDS
        while True:
            try:
                self.versions("none")
                return self
            except httpx.TransportError:
                log_text = (self.folder / "log").read_text()
                assert self._program.poll() is None and time.monotonic() < until, log_text
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        assert self._program is not None
        self._program.kill()
        self._program.wait()

    def call(self, path: str, **body: Any) -> None:
        """POST to the registry."""
        url = f"{self.url}/api/2.0/mlflow/{path}"
        headers = {"Authorization": f"Bearer {self.token}"}
        assert httpx.post(url, json=body, headers=headers, trust_env=False).is_success

    def versions(self, model: str) -> list[dict[str, Any]]:
        """Return all versions of a registered model, oldest first; tags as a mapping."""
        answer = httpx.get(
            f"{self.url}/api/2.0/mlflow/model-versions/search",
            params={"filter": f"name = '{model}'"},
            headers={"Authorization": f"Bearer {self.token}"},
            trust_env=False,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        found = [
            {**one, "tags": {tag["key"]: tag["value"] for tag in one["tags"]}}
            for one in answer.json().get("model_versions", ())
        ]
        return sorted(found, key=lambda one: int(one["version"]))
