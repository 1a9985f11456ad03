"""Roots. Internal: errors of storage that no real one gives on demand.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import pickle
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

import dcp
from dcp.server.problems import GoneError, NotFoundError, UnavailableError, UnprocessableError
from dcp.server.roots import Roots, StorageRoot, storage_problem
from dcp.server.settings import RootSettings
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    StorageError,
    StorageFullError,
    error_from_wire,
    error_to_wire,
)
from dcp.storage.stores.objects.store import FsspecStore
from tests.support.ports import refusing_port
from tests.support.s3 import S3Server, raw_s3


def _root(url: str, **options: object) -> StorageRoot:
    return StorageRoot("prod", RootSettings(url=url, storage_options=options))


def test_a_checkpoint_is_found_by_root_and_key(tmp_path: Path) -> None:
    """Folder of ours and single file both open, and are named by root and key alone."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "run" / "step-1")
    dcp.convert(tmp_path / "run" / "step-1", tmp_path / "run" / "model.safetensors", to="safetensors")
    root = _root(str(tmp_path))
    folder, file = root.source("run/step-1"), root.source("run/model.safetensors")
    assert list(folder.index.fqns) == ["w"]
    assert folder.name == "prod:run/step-1"
    assert file.file == "model.safetensors"
    assert np.array_equal(file.index.shape(0), (3,))


def test_roots_by_name() -> None:
    """Names are sorted, an unknown one is not found."""
    roots = Roots({"b": RootSettings(url="/b"), "a": RootSettings(url="file:///a%20b")})
    assert roots.names() == ["a", "b"]
    assert roots.get("a").path == Path("/a b")
    assert "c" not in roots
    with pytest.raises(NotFoundError):
        roots.get("c")


def test_walk_local(tmp_path: Path) -> None:
    """Every folder with its files; neither links nor temporary files."""
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "run" / "step-1" / "a.bin").write_bytes(b"12")
    (tmp_path / "run" / "step-1" / ".tmp-x").write_bytes(b"12")
    (tmp_path / "run" / "last").symlink_to("step-1")
    folders = {folder.key: folder for folder in _root(str(tmp_path)).walk()}
    assert set(folders) == {"", "run", "run/step-1"}
    assert folders["run"].folders == ("step-1",)
    assert list(folders["run/step-1"].files) == ["a.bin"]
    assert folders["run/step-1"].files["a.bin"].size_bytes == 2
    assert [folder.key for folder in _root(str(tmp_path)).walk("run")] == ["run", "run/step-1"]
    with pytest.raises(UnavailableError, match="the folder of root prod is not there"):
        list(_root(str(tmp_path / "none")).walk())


def test_walk_s3(s3_server: S3Server, s3_root: str) -> None:
    """One listing gives all folders, each once and complete, however names sort around the slash."""
    keys = ["a", "run/step-1/a", "run/step-1/z", "run/step-1.b/c", "run/step-10/a", "run/step-1/deep/x"]
    with raw_s3(s3_server) as raw:
        raw.write_many([(f"{s3_root}/{key}", b"123") for key in keys])
    root = _root(s3_root, **s3_server.storage_options)
    folders = [(folder.key, sorted(folder.files)) for folder in root.walk()]
    assert sorted(folders) == [
        ("", ["a"]),
        ("run/step-1", ["a", "z"]),
        ("run/step-1.b", ["c"]),
        ("run/step-1/deep", ["x"]),
        ("run/step-10", ["a"]),
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointNotFoundError("no"), 404),
        (StorageFullError("full"), 503),
        (StorageError("/secret/place: reset"), 503),
        (OSError("/secret/place"), 503),
        (CheckpointFormatError("bad"), 422),
        (CorruptCheckpointError("bad"), 422),
        (RuntimeError("/secret/place"), 500),
    ],
)
def test_errors_of_storage(error: Exception, status: int) -> None:
    """Each becomes a problem; that of storage itself does not repeat a message made for the log."""
    problem = storage_problem(error)
    assert problem.status == status
    assert "/secret/place" not in problem.detail


def test_problems_hide_places(tmp_path: Path) -> None:
    """Messages name the root instead of its path; what the catalog knows is gone rather than not found."""
    root = _root(str(tmp_path))
    problem = root.problem(CorruptCheckpointError(f"{tmp_path}/run/a.bin is damaged, token=abc"))
    assert problem.detail == "prod:run/a.bin is damaged, ***"
    for name in (
        "'model.embed_tokens.weight': no",
        "(did you mean 'model.embed_tokens.weight'?)",
        "tokenizer.json",
    ):
        assert root.problem(PlanError(f"{name}, 'token':'abc'")).detail == f"{name}, '***"
    assert isinstance(root.problem(CheckpointNotFoundError("x"), is_known=True), GoneError)
    with pytest.raises(NotFoundError):
        root.source("nothing")
    with pytest.raises(UnprocessableError):
        root.source("../x")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFoundError):
        root.source("file/below")


def test_nobody_waits_long_for_storage_that_is_away(s3_server: S3Server) -> None:
    """A root of a process that answers gives up within seconds; a trainer's goes on for minutes."""
    with refusing_port() as port, pytest.raises(UnavailableError):
        options = {**s3_server.storage_options, "endpoint_url": f"http://127.0.0.1:{port}"}
        settings = {"s3": RootSettings(url="s3://bucket/x", storage_options=options)}
        begun = time.monotonic()
        Roots(settings, is_answering=True).get("s3").source("run/step-1")
    assert time.monotonic() - begun < 60
    patient = Roots(settings).get("s3").open_store.storage_options
    assert "retry_seconds" not in patient
    given = {"s3": RootSettings(url="s3://bucket/x", storage_options={**options, "retry_seconds": 7})}
    assert Roots(given, is_answering=True).get("s3").open_store.storage_options["retry_seconds"] == 7


def test_storage_that_does_not_answer_is_unavailable(s3_server: S3Server) -> None:
    """A bucket that nobody has is not the client's fault, and not named in the answer."""
    root = _root("s3://no-such-bucket-here/x", **s3_server.storage_options)
    with pytest.raises((UnavailableError, NotFoundError)) as caught:
        root.source("run/step-1")
    assert "no-such-bucket" not in caught.value.detail


def test_the_tree_of_any_file_system_of_fsspec() -> None:
    """Where there is no listing of everything, folders are listed one by one; no address is signed there."""
    place = f"memory://tree-{uuid.uuid4().hex}"
    for name, data in {"a": b"1", "run/step-1/a": b"12", "run/step-1/b": b"", "run/step-2/a": b"123"}.items():
        folder, _, file = f"{place}/{name}".rpartition("/")
        with FsspecStore(folder).create(file, durable=False) as handle:
            handle.write(data)
    store = FsspecStore(place)
    assert sorted((folder, info.name, info.size_bytes) for folder, info in store.tree()) == [
        ("", "a", 1),
        ("run/step-1", "a", 2),
        ("run/step-1", "b", 0),
        ("run/step-2", "a", 3),
    ]
    assert store.presigned_url("a", 60) is None


@pytest.mark.parametrize("kind", [PlanError, CorruptCheckpointError, CheckpointConflictError])
def test_errors_advise_what_a_request_can_say(kind: type[CheckpointError]) -> None:
    """Arguments of Python and options of the command line become those of requests, or are left out."""
    drop = kind("Exclude them", alternative="drop all such values", argument="drop_objects=True")
    assert str(drop) == "Exclude them, or drop all such values with drop_objects=True (--drop-objects)"
    assert storage_problem(drop).detail == "Exclude them, or drop all such values with drop_objects=true"
    damaged = kind("Resume from another", alternative="load them as they are", argument="verify='none'")
    assert str(damaged) == "Resume from another, or load them as they are with verify='none'"
    assert storage_problem(damaged).detail == "Resume from another"
    assert storage_problem(kind("it exists")).detail == "it exists"


def test_what_an_argument_would_do_is_said_once() -> None:
    """Also by an error that has come from another rank or process."""
    there = PlanError("it is there", alternative="replace it", argument="overwrite=True")
    for copied in (error_from_wire(error_to_wire(there, "")), pickle.loads(pickle.dumps(there))):
        assert str(copied) == "it is there, or replace it with overwrite=True (--overwrite)"
        assert copied.finding == "it is there"
