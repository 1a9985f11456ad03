"""Conversions in stages of several processes: one target, the same bytes, whatever is repeated or dies."""

from __future__ import annotations

import base64
import json
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import dcp
from dcp.conversion import driver
from dcp.conversion.copying.tasks import TaskBatch, TaskResult
from dcp.conversion.driver import (
    Conversion,
    Prepared,
    SourceChangedError,
    discard_attempt,
)
from dcp.conversion.plan import ConversionOptions, LayoutOptions, plan_target
from dcp.conversion.run import convert
from dcp.conversion.targets.places import TargetPlace, place_of
from dcp.conversion.wire import decode_batch, decode_layout, decode_result, encode_batch, encode_result
from dcp.demo.s3_server import S3Server
from dcp.inspection.verification import verify_store
from dcp.storage.errors import CheckpointConflictError, CheckpointFormatError, CorruptCheckpointError
from dcp.storage.formats.opening.sources import open_source
from dcp.storage.stores.opening import OpenWith
from tests.support.conversion import training_state
from tests.support.programs import run_program
from tests.support.s3 import raw_s3

_TARGETS = {"torch": "model.pt", "safetensors": "folder", "dcp": "copy"}
_SHARD_BYTES = 3 << 20
_BATCH_BYTES = 5 << 20
_ATTEMPT = "0123456789abcdef"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training state without its large tensor, and 14 MiB of others: several batches of several files."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    state = training_state() | {f"t{n}": torch.full((1 << 19,), float(n)) for n in range(7)}
    state["kinds"] = {name: kind for name, kind in state["kinds"].items() if name not in ("large", "tied")}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks and batches of 5 MiB, so that there are some."""
    monkeypatch.setattr("dcp.conversion.copying.tasks.TASK_BYTES", 5 << 20)


def options_of(to: str) -> ConversionOptions:
    """What all tests here convert with; objects have no place in safetensors."""
    return ConversionOptions(LayoutOptions(to, files=2, shard_bytes=_SHARD_BYTES))


def staged(
    source: str | Path, target: TargetPlace, to: str, attempt: str = _ATTEMPT, options: Any = None
) -> Conversion:
    """One stage's own object."""
    found = open_source(source, open_store=OpenWith(options))
    return Conversion(found, target, options_of(to), attempt=attempt)


def prepare(stage: Conversion) -> tuple[Prepared, list[TaskBatch]]:
    """As a job does."""
    return stage.prepare(batch_bytes=_BATCH_BYTES)


def carry_out(source: str | Path, target: TargetPlace, to: str, *, times: int = 1) -> Prepared:
    """All stages, each by an object of its own and ``times`` over, with JSON between them."""
    with staged(source, target, to) as stage:
        made, batches = prepare(stage)
    prepared = Prepared.of_json(json.loads(json.dumps(made.to_json())))
    results: list[TaskResult] = []
    for batch in reversed([decode_batch(encode_batch(batch)) for batch in batches]):
        for _ in range(times):
            with staged(source, target, to) as stage:
                result = encode_result(stage.run(batch, prepared.source_mark))
        results.insert(0, decode_result(result))
    for _ in range(times):
        with staged(source, target, to) as stage:
            report = stage.publish(prepared, results)
    assert report.bytes_written > 12 << 20
    assert report.blocks_verified > 6
    return prepared


def bytes_of(path: Path) -> dict[str, bytes]:
    """The content of a file, or of all files of a folder but the commit, whose ids and times differ."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    names = {file: file.name.split(".")[0] if file.name.endswith(".distcp") else file.name for file in files}
    return {
        names[file]: file.read_bytes()
        for file in files
        if path.is_file() or file.name not in (".metadata", "manifest.msgpack")
    }


@pytest.mark.parametrize("to", list(_TARGETS))
@pytest.mark.parametrize("times", [1, 2])
def test_local_stages_make_what_convert_makes(to: str, times: int, source: Path, tmp_path: Path) -> None:
    """The same files with the same bytes, also if every batch and the publishing are done twice."""
    expected = tmp_path / "expected" / _TARGETS[to]
    convert(source, expected, to=to, files=2, shard_bytes=_SHARD_BYTES, executor="inline")
    target = tmp_path / "made" / _TARGETS[to]
    prepared = carry_out(source, place_of(target, to, OpenWith()), to, times=times)
    assert prepared.batch_count >= 3
    assert bytes_of(target) == bytes_of(expected)
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name]
    if to == "dcp":
        assert verify_store(OpenWith()(target)).findings == []


def test_the_layout_is_planned_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By preparing; batches and publishing get it as plain data, also where each of them is repeated."""
    planned: list[str] = []

    def plan(*arguments: Any) -> Any:
        planned.append("")
        return plan_target(*arguments)

    monkeypatch.setattr(driver, "plan_target", plan)
    carry_out(source, place_of(tmp_path / "copy", "dcp", OpenWith()), "dcp", times=2)
    assert len(planned) == 1


@pytest.mark.parametrize(
    ("to", "times"),
    [
        *(("torch", 1), ("dcp", 1), ("safetensors", 2)),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (("torch", 2), ("dcp", 2))),
        pytest.param("safetensors", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_stages_on_s3(
    to: str, times: int, source: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Objects with the same bytes as local files; what is repeated compares, and replaces nothing."""
    expected = tmp_path / "expected" / _TARGETS[to]
    convert(source, expected, to=to, files=2, shard_bytes=_SHARD_BYTES, executor="inline")
    opened = OpenWith(s3_server.storage_options)
    url = f"{s3_root}/{_TARGETS[to]}"
    carry_out(source, place_of(url, to, opened), to, times=times)
    with raw_s3(s3_server) as raw:
        names = raw.list(s3_root)
        assert not [name for name in names if ".tmp-" in name]
        if to == "dcp":
            assert verify_store(opened(url)).findings == []
        else:
            files = bytes_of(expected)
            prefix = s3_root if expected.is_file() else url
            assert {name: raw.read(f"{prefix}/{name}") for name in files} == files
        assert not raw.uploads(s3_root)


@pytest.mark.parametrize("to", list(_TARGETS))
def test_what_is_at_the_target_stays(
    to: str, source: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Nothing is prepared over it, and what comes into being meanwhile is not replaced by publishing."""
    for opened, base in (
        (OpenWith(), str(tmp_path / "made")),
        (OpenWith(s3_server.storage_options), s3_root),
    ):
        url = f"{base}/{_TARGETS[to]}"
        place = place_of(url, to, opened)
        with staged(source, place, to) as stage:
            prepared, batches = prepare(stage)
            results = [stage.run(batch, prepared.source_mark) for batch in batches]
        if place.path is not None:  # behind S3 the batches have made a file of this name themselves
            convert(source, url, to=to, only="model", executor="inline")
            before = bytes_of(place.path)
            with staged(source, place, to) as stage, pytest.raises(CheckpointConflictError):
                stage.publish(prepared, results)
            assert bytes_of(place.path) == before
        else:
            with staged(source, place, to) as stage:
                stage.publish(prepared, results)
        with (
            staged(source, place, to, attempt="f" * 16) as stage,
            pytest.raises(CheckpointConflictError, match="exists"),
        ):
            prepare(stage)


def test_objects_of_somebody_else_are_not_taken_for_ones_own(
    source: Path, s3_server: S3Server, s3_root: str
) -> None:
    """A shard's name that others took since preparing, even with a file of the same size, is a conflict."""
    url = f"{s3_root}/folder"
    place = place_of(url, "safetensors", OpenWith(s3_server.storage_options))
    with staged(source, place, "safetensors") as stage:
        prepared, batches = prepare(stage)
        stage.run(batches[0], prepared.source_mark)
        with raw_s3(s3_server) as raw:
            name = next(name for name in raw.list(url) if name.startswith("model-00001"))
            data = bytearray(raw.read(f"{url}/{name}"))
            data[-1] ^= 1
            raw.write(f"{url}/{name}", bytes(data))
            with pytest.raises(CheckpointConflictError, match="not of this conversion"):
                stage.run(batches[0], prepared.source_mark)
            discard_attempt(place, _ATTEMPT, prepared.batch_count)
            assert raw.read(f"{url}/{name}") == bytes(data)


def test_a_changed_source_is_refused(source: Path, tmp_path: Path) -> None:
    """No batch of another layout gets into a target, and nothing is published from it."""
    mine = tmp_path / "source"
    mine.mkdir()
    for path in source.iterdir():
        (mine / path.name).write_bytes(path.read_bytes())
    place = place_of(tmp_path / "made.pt", "torch", OpenWith())
    with staged(mine, place, "torch") as stage:
        prepared, batches = prepare(stage)
        results = [stage.run(batch, prepared.source_mark) for batch in batches]
    changed = next(mine.glob("*.distcp"))
    os.utime(changed, (1, 1))
    with staged(mine, place, "torch") as stage, pytest.raises(SourceChangedError, match="again"):
        stage.run(batches[0], prepared.source_mark)
    with staged(mine, place, "torch") as stage, pytest.raises(SourceChangedError):
        stage.publish(prepared, results)
    assert not (tmp_path / "made.pt").exists()


@pytest.mark.parametrize("is_local", [True, False])
def test_damage_publishes_nothing(
    is_local: bool, source: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """One flipped bit of the source: a batch or the publishing fails, and no file has the target's name."""
    mine = tmp_path / "source"
    mine.mkdir()
    for path in source.iterdir():
        (mine / path.name).write_bytes(path.read_bytes())
    data = bytearray((damaged := next(mine.glob("*.distcp"))).read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    target = str(tmp_path / "made.pt") if is_local else f"{s3_root}/made.pt"
    place = place_of(target, "torch", OpenWith(None if is_local else s3_server.storage_options))
    with staged(mine, place, "torch") as stage:
        prepared, batches = prepare(stage)
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            stage.publish(prepared, [stage.run(batch, prepared.source_mark) for batch in batches])
    assert not place.exists()


@pytest.mark.parametrize("to", ["torch", "safetensors", pytest.param("dcp", marks=pytest.mark.exhaustive)])
def test_what_is_given_up_leaves_nothing(
    to: str, source: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Discarding removes what batches have written; what was published stays as it is."""
    for opened, base in (
        (OpenWith(), str(tmp_path / "made")),
        (OpenWith(s3_server.storage_options), s3_root),
    ):
        place = place_of(f"{base}/{_TARGETS[to]}", to, opened)
        with staged(source, place, to) as stage:
            prepared, batches = prepare(stage)
            for batch in batches:
                stage.run(batch, prepared.source_mark)
        for _ in range(2):
            discard_attempt(place, _ATTEMPT, prepared.batch_count)
        if place.path is not None:
            assert list(place.path.parent.iterdir()) == []
        else:
            with raw_s3(s3_server) as raw:
                assert raw.list(s3_root) == {}
        if place.file_name is not None:  # then the file itself is all that there is
            continue
        carry_out(source, place, to)
        discard_attempt(place, _ATTEMPT, prepared.batch_count)
        found = opened(place.url)
        assert verify_store(found).findings == []
        assert found.list()


_PROGRAM = """
import json, os, signal, sys
from dcp.conversion.copying import tasks
tasks.TASK_BYTES = 5 << 20
from dcp.conversion.driver import Conversion, Prepared
from dcp.conversion.wire import decode_batch, decode_result, encode_batch, encode_result
from dcp.conversion.plan import ConversionOptions, LayoutOptions
from dcp.conversion.copying.sinks import observers
from dcp.conversion.targets.places import place_of
from dcp.storage.formats.opening.sources import open_source
from dcp.storage.stores.opening import OpenWith
source, target, to, kill_at, stage, attempt, options = sys.argv[1:8]
given = json.load(sys.stdin)
steps = []
def observe(op, name):
    steps.append(op)
    if len(steps) == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
observers.append(observe)
layout = LayoutOptions(to, files=2, shard_bytes=3 << 20)
place = place_of(target, to, OpenWith(json.loads(options)))
with Conversion(open_source(source), place, ConversionOptions(layout), attempt=attempt) as it:
    if stage == "prepare":
        prepared, batches = it.prepare(batch_bytes=5 << 20)
        answer = {"prepared": prepared.to_json(), "batches": [encode_batch(batch) for batch in batches]}
    else:
        if stage == "publish":
            prepared = Prepared.of_json(given["prepared"])
            it.publish(prepared, [decode_result(one) for one in given["results"]])
            answer = None
        else:
            batch = decode_batch(given["batches"][int(stage)])
            answer = encode_result(it.run(batch, given["prepared"]["source_mark"]))
print(json.dumps([answer, len(steps)]))
"""


class _Deaths:
    """Runs stages in processes that are killed at their n-th step, n = 1, 1 + stride, ..., then not."""

    def __init__(self, source: Path, target: str, to: str, options: Any, stride: int) -> None:
        self.arguments = [str(source), target, to]
        self.options, self.stride, self.deaths = json.dumps(options), stride, 0
        self.attempt = ""

    def run(self, stage: str, given: object) -> Any:
        for kill_at in range(1, 1000, self.stride):
            attempt = f"{self.deaths:016x}" if stage == "prepare" else self.attempt
            command = ["-c", _PROGRAM, *self.arguments, str(kill_at), stage, attempt, self.options]
            done = run_program(*command, stdin=json.dumps(given))
            if done.returncode == 0:
                self.attempt = attempt
                return json.loads(done.stdout)[0]
            assert done.returncode == -signal.SIGKILL, done.stderr
            self.deaths += 1
        raise AssertionError("it never ended")

    def convert(self) -> None:
        given: dict[str, Any] = self.run("prepare", {})
        results = [self.run(str(batch), given) for batch in range(len(given["batches"]))]
        self.run("publish", given | {"results": results})


@pytest.mark.parametrize(
    ("to", "is_local", "stride"),
    [
        ("dcp", True, 5),
        *(
            pytest.param(to, is_local, 1, marks=pytest.mark.exhaustive)
            for to in _TARGETS
            for is_local in (True, False)
        ),
    ],
)
def test_killed_anywhere(
    to: str, is_local: bool, stride: int, source: Path, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Every stage is killed at step after step and begun again: there is one target, and it is whole."""
    expected = tmp_path / "expected" / _TARGETS[to]
    convert(source, expected, to=to, files=2, shard_bytes=_SHARD_BYTES, executor="inline")
    options = None if is_local else s3_server.storage_options
    url = f"{tmp_path / 'made' if is_local else s3_root}/{_TARGETS[to]}"
    deaths = _Deaths(source, url, to, options, stride)
    deaths.convert()
    assert deaths.deaths >= 3
    if is_local:
        assert bytes_of(Path(url)) == bytes_of(expected)
        left = [name.name for name in Path(url).parent.iterdir() if not name.name.startswith(".tmp-convert-")]
        assert left == [_TARGETS[to]]
    if to == "dcp":
        assert verify_store(OpenWith(options)(url)).findings == []
    elif not is_local:
        prefix = s3_root if expected.is_file() else url
        with raw_s3(s3_server) as raw:
            files = bytes_of(expected)
            assert {name: raw.read(f"{prefix}/{name}") for name in files} == files
            assert sorted(raw.list(prefix)) == sorted(files)


@pytest.mark.parametrize("decode", [decode_batch, decode_layout, decode_result])
def test_a_plan_that_is_none_is_a_typed_error(decode: Callable[[str], object]) -> None:
    """No text of ours, cut off, or of something else: as a ledger of jobs that was damaged may have it."""
    plain = [5, "x", [], {}, [1, 2, 3], [1, False, [[1]]], list("abcdefgh"), [1, 2, b"x", b"x"]]
    packed = [base64.b64encode(zlib.compress(msgpack.packb(one))).decode() for one in plain]
    for text in ("", "no base64!", "AAAA", packed[0][:-6], *packed):
        with pytest.raises(CheckpointFormatError):
            decode(text)
