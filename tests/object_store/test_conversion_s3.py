"""Conversions to and from S3: resulting objects, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp import convert
from dcp.errors import CheckpointConflictError
from tests.support.conversion import training_state
from tests.support.fault_doors import findings
from tests.support.fault_plan import HANG
from tests.support.fault_proxy import FaultProxy
from tests.support.programs import Program
from tests.support.s3 import S3Server, raw_s3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a training state on disk."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    dcp.save(training_state(), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the training state as a torch.save file."""
    path = tmp_path_factory.mktemp("expected") / "model.pt"
    convert(source, path, to="torch", executor="inline")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("to", "name"), [("dcp", "copy"), ("torch", "model.pt"), ("safetensors", "model.safetensors")]
)
def test_conversions_to_s3_and_back(
    to: str, name: str, source: Path, expected: bytes, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Conversions from disk to S3, within S3, and back give the bytes of a local conversion."""
    options = s3_server.storage_options
    convert(source, f"{s3_root}/{name}", to=to, target_options=options, files=2)
    second = f"{s3_root}/second/model.pt"
    convert(f"{s3_root}/{name}", second, to="torch", storage_options=options, target_options=options)
    convert(f"{s3_root}/{name}", tmp_path / "model.pt", to="torch", storage_options=options)
    assert (tmp_path / "model.pt").read_bytes() == expected
    with raw_s3(s3_server) as raw:
        assert raw.read(second) == expected
        left = [key for key in raw.list(s3_root) if ".tmp-" in key]
        assert not left
        assert not raw.uploads(s3_root)


def test_a_checkpoint_on_s3_verifies_and_is_replaced(source: Path, s3_server: S3Server, s3_root: str) -> None:
    """A conversion commits as a save does, and replaces a checkpoint only with overwrite."""
    options = s3_server.storage_options
    url = f"{s3_root}/copy"
    convert(source, url, to="dcp", target_options=options, only="model", executor="inline")
    with pytest.raises(CheckpointConflictError, match="overwrite"):
        convert(source, url, to="dcp", target_options=options, executor="inline")
    made = convert(source, url, to="dcp", target_options=options, overwrite=True, executor="inline")
    assert findings(url, **options) == set()
    with raw_s3(s3_server) as raw:
        assert set(raw.list(url)) == {*made.files, ".metadata", "manifest.msgpack"}


_KILLED = """
import json, sys
from dcp import convert
source, target, options, settings = sys.argv[1:]
convert(source, target, executor="inline", target_options=json.loads(options), **json.loads(settings))
"""

_LARGE_TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("model.pt", {"to": "torch"}),
    "file": ("model.safetensors", {"to": "safetensors"}),
    "shards": ("model", {"to": "safetensors", "shard_bytes": 13 << 20}),
    "dcp": ("model", {"to": "dcp", "files": 2}),
}


def _kinds(*quick: tuple[str, bool]) -> Any:
    pairs = [(kind, more) for kind in _LARGE_TARGETS for more in (False, True)]
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.exhaustive) for pair in pairs]


def _assert_large(url: str, options: dict[str, Any]) -> None:
    """Load the large checkpoint, and assert that all of it is present."""
    loaded = {f"t{n}": torch.zeros(3 << 20, dtype=torch.int32) for n in range(2)}
    dcp.load(loaded, checkpoint_id=url, storage_options=options, no_dist=True)
    assert [int(tensor.sum()) for tensor in loaded.values()] == [0, 3 << 20]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save 24 MiB, so that each file of a target has several parts."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    state = {f"t{n}": torch.full((3 << 20,), n, dtype=torch.int32) for n in range(2)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _options(server: S3Server | FaultProxy) -> dict[str, Any]:
    return {**server.storage_options, "part_bytes": 5 << 20}


def _kill_at_the_first_part(source: Path, url: str, settings: dict[str, Any], proxy: FaultProxy) -> None:
    """Kill a conversion during the request for its first part, which does not reach the server."""
    proxy.spoil(HANG, operation="UploadPart", times=None)
    before = len(proxy.requests("UploadPart"))
    arguments = [str(source), url, json.dumps(_options(proxy)), json.dumps(settings)]
    process = Program("-c", _KILLED, *arguments)
    try:
        while len(proxy.requests("UploadPart")) == before:
            assert process.poll() is None, "it ended by itself"
            proxy.wait_for_request(0.1)
    finally:
        process.kill()
        process.wait()
    proxy.heal()


@pytest.mark.parametrize(("kind", "overwrite"), _kinds(("dcp", True)))
def test_a_rerun_ends_uploads_of_a_killed_conversion(
    kind: str, overwrite: bool, large: Path, s3_proxy: FaultProxy, s3_server: S3Server, s3_root: str
) -> None:
    """A conversion that is killed while it sends a part and then run again leaves no upload of its files.
    Uploads of other keys stay."""
    name, settings = _LARGE_TARGETS[kind]
    url = f"{s3_root}/{name}"
    others = [f"{s3_root}/{key}" for key in ("other.pt", "other/model.safetensors", "model/mine.safetensors")]
    with raw_s3(s3_server) as raw:
        if overwrite:
            convert(large, url, target_options=_options(s3_server), executor="inline", **settings)
        kept = {raw.begin_upload(other) for other in others}
        _kill_at_the_first_part(large, url, {**settings, "overwrite": overwrite}, s3_proxy)
        assert len(raw.uploads(s3_root)) == len(kept) + 1
        made = convert(
            large, url, target_options=_options(s3_server), executor="inline", overwrite=overwrite, **settings
        )
        assert set(raw.uploads(s3_root)) == kept
        names = set(raw.list(s3_root))
    folder = "" if kind in ("torch", "file") else f"{name}/"
    assert {f"{folder}{file}" for file in made.files} <= names
    _assert_large(url, _options(s3_server))
