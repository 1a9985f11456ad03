"""Ids that name no place: one typed error, before anything is asked of a disk or a service."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.inspection.checkpoints import list_checkpoints, open_index
from dcp.storage.errors import CheckpointNotFoundError, StorageError
from dcp.storage.stores.objects import requests

NO_PLACES: dict[str, Any] = {
    "bytes": b"/tmp/x",
    "bytearray": bytearray(b"x"),
    "number": 5,
    "NUL": "/tmp/a\0b",
    "NUL in a path": Path("/tmp/a\0b"),
    "no character": "/tmp/\ud800",
    "NUL in a URL": "s3://bucket/a\0b",
}

USES: dict[str, Callable[[Any], Any]] = {
    "save": lambda place: dcp.save({"a": torch.ones(1)}, checkpoint_id=place, no_dist=True),
    "load": lambda place: dcp.load({"a": torch.ones(1)}, checkpoint_id=place, no_dist=True),
    "async": lambda place: dcp.async_save({"a": torch.ones(1)}, checkpoint_id=place, no_dist=True),
    "writer": lambda place: dcp.FileSystemWriter(place).prepare(),
    "reader": lambda place: dcp.FileSystemReader(place).read_metadata(),
    "manager": lambda place: dcp.CheckpointManager(place),
    "index": open_index,
    "list": list_checkpoints,
    "source": lambda place: dcp.convert(place, "/nowhere/t.pt", to="torch"),
    "target": lambda place: dcp.convert("/nowhere", place, to="torch"),
}


@pytest.mark.parametrize("kind", NO_PLACES)
@pytest.mark.parametrize("use", USES)
def test_what_names_no_place_is_told_at_once(use: str, kind: str) -> None:
    """The error is of this package and says what was given."""
    with pytest.raises(StorageError) as caught:
        USES[use](NO_PLACES[kind])
    assert any(word in str(caught.value) for word in ("named by a str", "NUL", "encoding"))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("use", ["save", "load", "index", "target"])
def test_a_name_that_is_too_long(use: str, tmp_path: Path) -> None:
    """What only the file system knows is its error, typed."""
    with pytest.raises(StorageError, match="too long"):
        USES[use](tmp_path / ("x" * 300))


@pytest.mark.parametrize("leads_to", ["nowhere", "link"])
def test_a_link_that_leads_nowhere(leads_to: str, tmp_path: Path) -> None:
    """The error names the link; "File exists", or a folder without a checkpoint, would be half of it."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / leads_to)
    for place in (link, link / "step-1"):
        with pytest.raises(StorageError, match=f"{link} is a symbolic link to {tmp_path / leads_to}"):
            USES["save"](place)
        with pytest.raises(dcp.CheckpointError, match="symbolic link"):
            USES["load"](place)
    if leads_to == "nowhere":
        with pytest.raises(CheckpointNotFoundError, match="is a symbolic link"):
            USES["load"](link)


def test_a_host_without_an_address_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never answered, so it is no outage; that it "has no such file" is not known either."""
    monkeypatch.setattr(requests, "_UNRESOLVED_SECONDS", 0.5)
    load = functools.partial(USES["load"], "http://no-such-host.invalid/x")
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"no-such-host\.invalid") as caught:
        load()
    assert time.monotonic() - begun < 60
    assert not isinstance(caught.value, CheckpointNotFoundError)
    assert "Cannot connect" in str(caught.value)


def test_a_host_that_answered_before_may_be_away_for_longer() -> None:
    """The name server of a cluster may fail, too: what was there is waited for."""
    from dcp.storage.stores.objects.client import Failure, RequestError
    from dcp.storage.stores.objects.options import ObjectOptions

    failures = [RequestError(Failure.PASSING, "no address", is_unresolved=True) for _ in range(3)]

    def attempt() -> str:
        if failures:
            raise failures.pop()
        return "here"

    host = requests.Requests("http://once-here.invalid/x", "http", ObjectOptions())
    assert host.run("get", "a", lambda: "here") == "here"
    assert host.run("get", "a", attempt) == "here"
