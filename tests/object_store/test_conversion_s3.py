"""Conversions to and from S3. Internal: its observers, to stop between two steps that no request parts."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp
from dcp import convert
from dcp.conversion.copying.executors import Inline
from dcp.conversion.copying.sinks import observers
from dcp.errors import CheckpointConflictError, CorruptCheckpointError
from tests.support.conversion import assert_same, training_state
from tests.support.fault_doors import findings
from tests.support.fault_doors import run as run_command
from tests.support.fault_plan import HANG
from tests.support.fault_proxy import FaultProxy
from tests.support.programs import Program, run_program
from tests.support.s3 import S3Server, raw_s3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training state on the disk."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    dcp.save(training_state(), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The torch.save file of it."""
    path = tmp_path_factory.mktemp("expected") / "model.pt"
    convert(source, path, to="torch", executor="inline")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("to", "name"), [("dcp", "copy"), ("torch", "model.pt"), ("safetensors", "model.safetensors")]
)
def test_to_s3_and_back(
    to: str, name: str, source: Path, expected: bytes, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Local to S3 in each format, S3 to S3, and back: the bytes are those of a local conversion."""
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
    """It is committed as a save would commit it, and an existing one stays unless it is to go."""
    options = s3_server.storage_options
    url = f"{s3_root}/copy"
    convert(source, url, to="dcp", target_options=options, only="model", executor="inline")
    with pytest.raises(CheckpointConflictError, match="overwrite"):
        convert(source, url, to="dcp", target_options=options, executor="inline")
    made = convert(source, url, to="dcp", target_options=options, overwrite=True, executor="inline")
    assert findings(url, **options) == set()
    with raw_s3(s3_server) as raw:
        assert set(raw.list(url)) == {*made.files, ".metadata", "manifest.msgpack"}


def test_files_that_are_there_are_not_made_again(
    source: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Stopped after some shards, it goes on with the others."""
    options = s3_server.storage_options
    url = f"{s3_root}/model"
    settings = {"only": "model", "shard_bytes": 100, "executor": "inline", "to": "safetensors"}
    local = convert(source, tmp_path / "model", **settings)  # type: ignore[arg-type]
    shards = [name for name in local.files if name.endswith(".safetensors")]
    assert len(shards) > 3
    stopped: list[str] = []

    def stop(progress: object) -> None:
        stopped.append("")
        if len(stopped) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, url, target_options=options, progress=stop, **settings)  # type: ignore[arg-type]
    with raw_s3(s3_server) as raw:
        before = raw.list(url)
    assert not any("index.json" in name for name in before)
    report = convert(source, url, target_options=options, **settings)  # type: ignore[arg-type]
    assert report.tasks_resumed >= 1
    with raw_s3(s3_server) as raw:
        assert sorted(raw.list(url)) == sorted(local.files)
        for name in local.files:
            assert raw.read(f"{url}/{name}") == (tmp_path / "model" / name).read_bytes()


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_shards_of_another_source_are_not_taken_for_its_own(
    to: Any, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """a to m is stopped behind its first shard; b to m, killed as soon as a shard of the same name and size
    is there, has noted nothing: a to m, called again, has no value of b."""
    options, url = s3_server.storage_options, f"{s3_root}/m"
    for value in (1, 2):
        state = {f"t{n}": torch.full((100,), value, dtype=torch.int32) for n in range(3)}
        dcp.save(state, checkpoint_id=tmp_path / str(value), no_dist=True)

    def stopped_at(step: str, source: int) -> None:
        def observe(op: str, name: str) -> None:
            if op == step:
                raise KeyboardInterrupt

        def noted(progress: object) -> None:
            observe("noted", "")

        observers.append(observe)
        try:
            with pytest.raises(KeyboardInterrupt):
                run(source, progress=noted)
        finally:
            observers.remove(observe)

    def run(source: int, progress: Any = None) -> None:
        convert(
            tmp_path / str(source),
            url,
            to=to,
            shard_bytes=500 if to == "safetensors" else None,
            files=3,
            overwrite=True,
            executor="inline",
            target_options=options,
            progress=progress,
        )

    stopped_at("noted", 1)
    stopped_at("finished", 2)
    run(1)
    loaded = {f"t{n}": torch.zeros(100, dtype=torch.int32) for n in range(3)}
    dcp.load(loaded, checkpoint_id=url, storage_options=options, no_dist=True)
    assert {value for tensor in loaded.values() for value in tensor.tolist()} == {1}


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
    """What is there is all of the large one."""
    loaded = {f"t{n}": torch.zeros(3 << 20, dtype=torch.int32) for n in range(2)}
    dcp.load(loaded, checkpoint_id=url, storage_options=options, no_dist=True)
    assert [int(tensor.sum()) for tensor in loaded.values()] == [0, 3 << 20]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MiB, of which each file of a target has several parts."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    state = {f"t{n}": torch.full((3 << 20,), n, dtype=torch.int32) for n in range(2)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _options(server: S3Server | FaultProxy) -> dict[str, Any]:
    return {**server.storage_options, "part_bytes": 5 << 20}


def _kill_at_the_first_part(source: Path, url: str, settings: dict[str, Any], proxy: FaultProxy) -> None:
    """A conversion that dies while its first part is under way; the server has not heard of that part."""
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


_KILLED_WHEN_FINISHED = (
    """
import os, signal
from dcp.conversion.copying.executors import Inline
from dcp.conversion.copying.sinks import observers
def observe(op, name):
    if op == "finished":
        os.kill(os.getpid(), signal.SIGKILL)
observers.append(observe)
"""
    + _KILLED
)


@pytest.mark.parametrize(("kind", "is_foreign"), _kinds(("torch", False), ("dcp", True)))
def test_what_was_finished_and_not_noted_is_compared(
    kind: str, is_foreign: bool, large: Path, s3_server: S3Server, s3_root: str
) -> None:
    """Killed between an object's completion and the ledger's entry, a conversion is done by the same call. An
    object there that has other bytes is refused, and stays."""
    name, settings = _LARGE_TARGETS[kind]
    url, options = f"{s3_root}/{name}", _options(s3_server)
    arguments = [str(large), url, json.dumps(options), json.dumps(settings)]
    killed = run_program("-c", _KILLED_WHEN_FINISHED, *arguments)
    assert killed.returncode == -signal.SIGKILL

    def again() -> None:
        convert(large, url, target_options=options, executor="inline", **settings)

    with raw_s3(s3_server) as raw:
        (key,) = (key for key in raw.list(s3_root) if ".tmp-" not in key)
        made = raw.read(f"{s3_root}/{key}")
        if is_foreign:
            foreign = made[:-1] + bytes([made[-1] ^ 1])
            raw.write(f"{s3_root}/{key}", foreign)
            with pytest.raises(CheckpointConflictError, match="not of this conversion"):
                again()
            assert raw.read(f"{s3_root}/{key}") == foreign
            return
        again()
        assert raw.read(f"{s3_root}/{key}") == made
        assert not [key for key in raw.list(s3_root) if ".tmp-" in key]
    _assert_large(url, options)


@pytest.mark.parametrize(("kind", "overwrite"), _kinds(("dcp", True)))
def test_uploads_of_a_killed_conversion_end_with_the_next(
    kind: str, overwrite: bool, large: Path, s3_proxy: FaultProxy, s3_server: S3Server, s3_root: str
) -> None:
    """Killed while a part is sent, and finished by another call: no upload of its files stays, and those of
    other keys do."""
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


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.exhaustive), "shards"])
def test_gc_knows_the_uploads_of_conversions(
    kind: str, large: Path, s3_proxy: FaultProxy, s3_server: S3Server, s3_root: str
) -> None:
    """They are listed and end when that is asked for, or with the ledger once that is old; a user's own
    uploads stay."""
    name, settings = _LARGE_TARGETS[kind]
    with raw_s3(s3_server) as raw:
        kept = {raw.begin_upload(f"{s3_root}/own.pt"), raw.begin_upload(f"{s3_root}/model/own.safetensors")}
        for arguments in (["--uploads"], ["--hours", "0"]):
            _kill_at_the_first_part(large, f"{s3_root}/{name}", settings, s3_proxy)
            (upload,) = (key for number, key in raw.uploads(s3_root).items() if number not in kept)
            options = ["--storage-options", json.dumps(s3_server.storage_options)]
            listed = run_command("gc", s3_root, *options).out
            assert f"  {upload.rpartition('/')[2]} (unfinished upload; stays, unless --uploads)\n" in listed
            assert "own" not in listed
            assert run_command("gc", s3_root, "--yes", *arguments, *options).status == 0
            assert set(raw.uploads(s3_root)) == kept


def test_of_two_conversions_at_once_one_is_there(large: Path, s3_server: S3Server, s3_root: str) -> None:
    """The first to finish ends the upload of the other, which replaces nothing then and says so."""
    url, server = f"{s3_root}/model.pt", _options(s3_server)
    settings = {"to": "torch", "executor": "inline", "overwrite": True}
    raced: list[str] = []

    def race(op: str, name: str) -> None:
        if op == "finish" and not raced:  # all of it is written, and the old file would go now
            raced.append(name)
            convert(large, url, only="t1", target_options=server, **settings)  # type: ignore[arg-type]

    convert(large, url, target_options=server, **settings)  # type: ignore[arg-type]
    observers.append(race)
    try:
        with pytest.raises(CheckpointConflictError, match="another writer has finished"):
            convert(large, url, target_options=server, **settings)  # type: ignore[arg-type]
    finally:
        observers.remove(race)
    loaded = {"t1": torch.zeros(3 << 20, dtype=torch.int32)}
    dcp.load(loaded, checkpoint_id=url, storage_options=server, no_dist=True)
    assert int(loaded["t1"].sum()) == 3 << 20
    with raw_s3(s3_server) as raw:
        assert raw.uploads(s3_root) == {}


@pytest.mark.parametrize(
    "kind",
    ["dcp", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("torch", "file", "shards"))],
)
def test_a_damaged_source_leaves_and_replaces_nothing(
    kind: str, large: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Worker processes compare before a file appears: the old one stays, and of a folder's new files none."""
    name, settings = _LARGE_TARGETS[kind]
    url, options = f"{s3_root}/{name}", _options(s3_server)
    damaged = tmp_path / "damaged"
    shutil.copytree(large, damaged)
    file = next(damaged.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 1
    file.write_bytes(data)
    before: dict[str, bytes] = {}
    with raw_s3(s3_server) as raw:
        if kind in ("torch", "file"):
            convert(large, url, target_options=options, executor="inline", **settings)
            before = {name: raw.read(url)}
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            convert(damaged, url, target_options=options, workers=2, overwrite=True, **settings)
        assert {key: raw.read(f"{s3_root}/{key}") for key in raw.list(s3_root)} == before
        assert not raw.uploads(s3_root)


def test_a_file_that_nobody_heard_of_is_removed(
    large: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """A process had written it, and was ended before it could say so, because another one found damage."""
    url, options = f"{s3_root}/model", _options(s3_server)
    with raw_s3(s3_server) as raw:

        class Executor(Inline):
            def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
                super().submit(fn, *args, **kwargs).result()
                raise CorruptCheckpointError("damaged")

        with pytest.raises(CorruptCheckpointError, match="damaged"):
            convert(large, url, target_options=options, executor=Executor(), **_LARGE_TARGETS["shards"][1])
        assert not [*raw.list(s3_root)]


def test_a_store_in_memory(source: Path, expected: bytes, tmp_path: Path) -> None:
    """Such a store is of this process: it converts here, whatever the executor."""
    convert(source, "memory://conversion/copy", to="dcp", executor="processes")
    convert("memory://conversion/copy", tmp_path / "model.pt", to="torch")
    assert (tmp_path / "model.pt").read_bytes() == expected
    convert(
        "memory://conversion/copy", "memory://conversion/flat/m.safetensors", to="safetensors", only="model"
    )
    convert("memory://conversion/flat/m.safetensors", tmp_path / "m.safetensors", to="safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert {name.removeprefix("model.") for name in loaded} == set(training_state()["model"])
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True)["epoch"], 7)
