"""Fixtures: a service over checkpoints of every kind, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import dcp
from tests.support.app import App, running_app
from tests.support.conversion import many_kinds, sharded_tensors, training_state
from tests.support.sharded import grid, save_sharded
from tests.support.sockets import listening

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(60_000.0).reshape(200, 300), "b": torch.ones(7, dtype=torch.bfloat16)},
    "step": 3,
}


@dataclass
class DataSite:
    """A service with the roots "main" and "other" below ``folder``; ``http`` is a client of an admin."""

    app: App
    folder: Path
    url: str
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.http = self.client("admin")
        self._known: dict[tuple[str, str], str] = {}

    def client(self, *scopes: Any, **given: Any) -> httpx.Client:
        """Return a client with a new key of these scopes, or without a key."""
        headers = {"Authorization": f"Bearer {self.app.key(*scopes, **given)}"} if scopes else {}
        return self.stack.enter_context(
            httpx.Client(base_url=self.url, headers=headers, timeout=120, verify=False)
        )

    def known(self, key: str = "run/step-3", root: str = "main") -> str:
        """Register a checkpoint once, and return its URL."""
        if (root, key) not in self._known:
            answer = self.http.post("/api/v1/checkpoints", json={"root": root, "key": key})
            self._known[root, key] = f"/api/v1/checkpoints/{answer.raise_for_status().json()['id']}"
        return self._known[root, key]

    def save(self, key: str, state: dict[str, Any] | None = None, root: str = "main") -> Path:
        """Save a new checkpoint, and return its folder."""
        dcp.save(STATE if state is None else state, checkpoint_id=self.folder / root / key, no_dist=True)
        return self.folder / root / key


def data_site(stack: ExitStack, folder: Path, url: str | None = None, **settings: Any) -> DataSite:
    """Start a service that ends with the stack."""
    url = url or f"sqlite:///{folder / 'catalog.sqlite'}"
    settings = {"rate_limit": "100000/minute", **settings}
    app = stack.enter_context(running_app(url, folder, **settings))
    return DataSite(app, folder, stack.enter_context(listening(app.app)), stack)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataSite]:
    """Start a service with checkpoints of each writer and kind of tensor in "main", one in "other"."""
    folder = tmp_path_factory.mktemp("data")
    main = folder / "main"
    dcp.save(many_kinds(), checkpoint_id=main / "kinds", no_dist=True)
    dcp.save(training_state(), checkpoint_id=main / "training", no_dist=True)
    torch.distributed.checkpoint.save(
        {"a": {"b": torch.arange(900_000.0)}}, checkpoint_id=main / "stock", no_dist=True
    )
    torch.save({"t": torch.arange(900_000.0).reshape(900, 1000).t(), "n": 3}, main / "turned.pt")
    cuts = {"rows": (4, 1), "columns": (1, 4), "deep": (1, 2, 4), "both": (2, 2), "wide": (1, 4)}
    tensors = sharded_tensors()
    save_sharded(main / "sharded", tensors, {name: grid(tensors[name].shape, cuts[name]) for name in cuts})
    with ExitStack() as stack:
        made = data_site(stack, folder)
        made.save("run/step-3")
        made.save("run/step-3", root="other")
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[DataSite]:
    """Start a service for a single test that changes stored files."""
    with ExitStack() as stack:
        yield data_site(stack, tmp_path)
