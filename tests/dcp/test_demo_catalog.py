"""The service that the demo starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dcp.demo import catalog_service
from dcp.demo.catalog_service import CatalogService
from dcp.demo.places import FolderPlace


@pytest.mark.exhaustive
def test_a_port_that_is_taken_meanwhile_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for a free port and its use somebody else may have it: another one is taken."""
    for name in ("logs", "checkpoints"):
        (tmp_path / name).mkdir()
    free_port = catalog_service._free_port
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = [taken]
        monkeypatch.setattr(catalog_service, "_free_port", lambda: ports.pop() if ports else free_port())
        with CatalogService(tmp_path, FolderPlace(tmp_path / "checkpoints")) as service:
            assert service.url != f"http://127.0.0.1:{taken}"
