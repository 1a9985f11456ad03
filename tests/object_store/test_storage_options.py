"""``storage_options``: passed to the storage by each function, and never shown."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CheckpointError, StorageError
from tests.support.fault_doors import findings, given, run
from tests.support.s3 import S3Server
from tests.support.versions import version_of, version_state

# -- functions -----------------------------------------------------------------------------------------------


def _seen(url: str, options: dict[str, Any]) -> int | str:
    state = version_state(0)
    dcp.load(state, checkpoint_id=url, storage_options=options, no_dist=True)
    return version_of(state)


def test_every_function_takes_storage_options(s3_server: S3Server, s3_root: str) -> None:
    """save, async_save, load, open_index, ls and verify take storage options."""
    options = s3_server.storage_options
    dcp.save(version_state(1), checkpoint_id=f"{s3_root}/step-1", storage_options=options, no_dist=True)
    future = dcp.async_save(
        version_state(2), checkpoint_id=f"{s3_root}/step-2/", storage_options=options, no_dist=True
    )
    assert "model.w" in future.result(60).state_dict_metadata
    assert [_seen(f"{s3_root}/step-{step}", options) for step in (1, 2)] == [1, 2]
    assert "model.w" in dcp.open_index(f"{s3_root}/step-1", storage_options=options).fqns
    assert [row["step"] for row in run("ls", s3_root, "--json", *given(options)).json] == [1, 2]
    assert findings(f"{s3_root}/step-2", **options) == set()


# -- refused options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dcp.FileSystemWriter, dcp.FsspecWriter])
def test_options_beside_a_storage_are_refused(tmp_path: Path, kind: Any) -> None:
    """Options beside a given reader or writer, which would ignore them, are refused unless empty."""
    state = {"w": torch.ones(3)}
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(CheckpointError, match="storage_writer is given") as caught:
            save(state, storage_writer=kind(tmp_path), storage_options={"secret": "hush"}, no_dist=True)
        assert "hush" not in str(caught.value)
    dcp.save(state, storage_writer=kind(tmp_path), storage_options={}, no_dist=True)
    with pytest.raises(CheckpointError, match="storage_reader is given"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), storage_options={"key": "k"})


def test_paths_and_memory_take_no_options(tmp_path: Path) -> None:
    """Options are refused for a local path and for memory://, so a typing error in a URL is an error."""
    for place in (tmp_path / "x", "memory://options"):
        with pytest.raises(StorageError, match="takes no storage options: remove secret") as caught:
            dcp.save({"n": 1}, checkpoint_id=place, storage_options={"secret": "hush"}, no_dist=True)
        assert "hush" not in str(caught.value)
    with pytest.raises(TypeError, match="storage_options must be a mapping") as mistaken:
        dcp.load({"n": 1}, checkpoint_id=tmp_path, storage_options="hush")  # type: ignore[arg-type]
    assert "hush" not in str(mistaken.value)
    assert list(tmp_path.iterdir()) == []


# -- secrets -------------------------------------------------------------------------------------------------


def test_secrets_are_not_shown(
    s3_server: S3Server, s3_root: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Secrets are absent from reprs, errors, causes and log records; wrong secrets raise a typed error."""
    secret = "hush-hush-hush"
    good = s3_server.storage_options
    wrong = {**good, "secret": secret, "retry_seconds": 0}
    writer, reader = dcp.FsspecWriter(s3_root, **wrong), dcp.FsspecReader(s3_root, **wrong)
    shown = [repr(thing) for thing in (writer.open_store, vars(writer), vars(reader), writer.store)]
    errors: list[Exception] = []
    caplog.set_level(logging.DEBUG)
    attempts: list[Callable[[], object]] = [
        lambda: dcp.save({"n": 1}, checkpoint_id=s3_root, storage_options=wrong, no_dist=True),
        lambda: dcp.load({"n": 1}, checkpoint_id=s3_root, storage_options=wrong, no_dist=True),
        lambda: dcp.CheckpointManager(s3_root, storage_options=wrong, no_dist=True).all_steps(),
        lambda: dcp.open_index(s3_root, storage_options=good | {"no_such_option": secret}),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError) as caught:
            attempt()
        errors.append(caught.value)
    future = dcp.async_save({"n": 1}, checkpoint_id=s3_root, storage_options=wrong, no_dist=True)
    error = future.exception(60)
    assert isinstance(error, StorageError)
    errors.append(error)
    shown += [
        "".join(traceback.format_exception(error)) + repr(getattr(error, "facts", "")) for error in errors
    ]
    shown += [caplog.text, *capfd.readouterr()]
    assert "SignatureDoesNotMatch" in shown[4]
    for text in shown:
        assert secret not in text
        assert good["secret"] not in text
