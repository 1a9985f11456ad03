"""Conversions as jobs: on local and S3 roots, registered with their origin, once, whatever is repeated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from sqlalchemy import select

import dcp
from dcp.conversion.copying.sinks import observers
from dcp.demo.s3_server import S3Server
from dcp.inspection.verification import verify_store
from dcp.server.catalog.errors import StateError
from dcp.server.catalog.labelling.lineage import lineage_of
from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, checkpoints, events, jobs
from dcp.server.jobs.kinds.convert import ConvertOptions, ConvertParams
from dcp.server.jobs.kinds.shared import renaming
from dcp.server.jobs.ledger import request_cancel
from dcp.server.jobs.ledger.states import Claim
from dcp.server.problems import ProblemError
from dcp.storage.stores.opening import OpenWith
from tests.support.kind_runs import KindRuns
from tests.support.s3 import raw_s3

_STATE: dict[str, Any] = {
    "weight": torch.arange(600.0).reshape(20, 30),
    "bias": torch.ones(7, dtype=torch.bfloat16),
    "step": 5,
}


def folders(tmp_path: Path) -> dict[str, Any]:
    """Two local roots, and one that is only read."""
    return {
        "main": {"url": str(tmp_path / "main")},
        "export": {"url": str(tmp_path / "export")},
        "frozen": {"url": str(tmp_path / "frozen"), "readonly": True},
    }


def on_disk(database: Database, tmp_path: Path) -> KindRuns:
    """A checkpoint in one of them."""
    for name in ("export", "frozen"):
        (tmp_path / name).mkdir()
    dcp.save(_STATE, checkpoint_id=tmp_path / "main/run/step-5", no_dist=True)
    made = KindRuns(database, tmp_path / "work", folders(tmp_path))
    made.scan("main")
    return made


def on_s3(database: Database, tmp_path: Path, server: S3Server, root: str) -> KindRuns:
    """The same on S3, with a second root beside it."""
    options = server.storage_options
    dcp.save(_STATE, checkpoint_id=f"{root}/main/run/step-5", storage_options=options, no_dist=True)
    roots = {name: {"url": f"{root}/{name}", "storage_options": options} for name in ("main", "export")}
    made = KindRuns(database, tmp_path / "work", roots)
    made.scan("main")
    return made


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> KindRuns:
    """Local roots."""
    return on_disk(database, tmp_path)


@pytest.fixture
def s3_runs(database: Database, tmp_path: Path, s3_server: S3Server, s3_root: str) -> KindRuns:
    """Roots on S3."""
    return on_s3(database, tmp_path, s3_server, s3_root)


@pytest.fixture(params=["local", "s3"])
def any_runs(
    request: pytest.FixtureRequest, database: Database, tmp_path: Path, s3_server: S3Server, s3_root: str
) -> KindRuns:
    """Both, one after the other."""
    return (
        on_disk(database, tmp_path)
        if request.param == "local"
        else on_s3(database, tmp_path, s3_server, s3_root)
    )


def check_target(runs: KindRuns, key: str, result: Any) -> None:
    """It is in the catalog with its origin and structure, and others were told."""
    row, source = runs.row("export", key), runs.id("main", "run/step-5")
    assert (row.state, row.step) == ("committed", 5)
    assert row.structure_id is not None
    assert row.bytes == result["bytes_written"] and row.file_count == result["file_count"]
    with runs.database.read() as connection:
        ancestry = lineage_of(connection, row.id)
    assert [(edge.child_id, edge.parent_id, edge.kind) for edge in ancestry.edges] == [
        (row.id, source, "converted_from")
    ]
    told = runs.all(select(events).where(events.c.checkpoint_id == row.id).order_by(events.c.id))
    assert [one.kind for one in told] == ["checkpoint.committed", "checkpoint.converted"]
    assert told[1].data["source_id"] == source


def test_a_scan_that_has_begun_is_not_the_one_that_reads_the_structure(runs: KindRuns) -> None:
    """It may have listed the folder before the target was there: another one follows it, and only one."""
    number = runs.id("main", "run/step-5")
    runs.submit("scan", root="export", below="a")
    assert runs.claim() is not None, "and it is at it for long"
    for name in ("first", "second"):
        runs.submit("convert", checkpoint_id=number, to="dcp", target_root="export", target_key=f"a/{name}")
    done = runs.drain()
    assert [job.state for job in done if job.kind == "convert"] == ["succeeded"] * 2
    for name in ("first", "second"):
        assert runs.row("export", f"a/{name}").structure_id is not None
    assert len(runs.all(select(jobs).where(jobs.c.kind == "scan"))) <= 3


@pytest.mark.parametrize(
    ("to", "key"),
    [
        ("safetensors", "a/step-5.safetensors"),
        ("safetensors", "a/step-5"),
        ("torch", "step-5.pt"),
        ("dcp", "b/c/5"),
    ],
)
def test_to_another_root(to: str, key: str, runs: KindRuns, tmp_path: Path) -> None:
    """Each format: the bytes load elsewhere, and nothing is left beside them."""
    number = runs.id("main", "run/step-5")
    job = runs.do("convert", checkpoint_id=number, to=to, target_root="export", target_key=key, tags=["made"])
    assert job.state == "succeeded" and job.result is not None, job.error
    target = tmp_path / "export" / key
    if to == "safetensors":
        found = load_file(target if target.is_file() else target / "model.safetensors")
        assert torch.equal(found["weight"], _STATE["weight"])
        assert found["bias"].dtype == torch.bfloat16
    elif to == "torch":
        assert torch.equal(torch.load(target, weights_only=True)["weight"], _STATE["weight"])
    else:
        assert verify_store(OpenWith()(target)).findings == []
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    check_target(runs, key, job.result)
    told = json.dumps(job.result)
    assert str(tmp_path) not in told and runs.row("export", key).save_id == job.result["target"]["save_id"]


@pytest.mark.parametrize(
    ("to", "key"), [("safetensors", "a/step-5.safetensors"), ("torch", "step-5.pt"), ("dcp", "b/c/step-5")]
)
def test_on_s3(to: str, key: str, s3_runs: KindRuns, s3_server: S3Server, s3_root: str) -> None:
    """From S3 to S3."""
    number = s3_runs.id("main", "run/step-5")
    job = s3_runs.do("convert", checkpoint_id=number, to=to, target_root="export", target_key=key)
    assert job.state == "succeeded", job.error
    check_target(s3_runs, key, job.result)
    with raw_s3(s3_server) as raw:
        assert not [name for name in raw.list(f"{s3_root}/export") if ".tmp-" in name]
    if to == "dcp":
        store = OpenWith(s3_server.storage_options)(f"{s3_root}/export/{key}")
        assert verify_store(store).findings == []
    said = json.dumps([job.result, job.params])
    assert s3_root not in said and s3_server.storage_options["secret"] not in said


@pytest.mark.parametrize(("to", "key"), [("safetensors", "x.safetensors"), ("dcp", "x")])
def test_every_phase_may_be_lost_after_its_work(to: str, key: str, any_runs: KindRuns) -> None:
    """Workers die when the work is done and nobody knows: done again, there is one target, row and event."""
    runs = any_runs
    number = runs.id("main", "run/step-5")
    job_id = runs.submit("convert", checkpoint_id=number, to=to, target_root="export", target_key=key)
    lost: set[str] = set()
    while (made := runs.claim()) is not None:
        answer = runs.carry_out(made)
        assert not isinstance(answer, Exception), answer
        if made.job.id == job_id and made.phase not in lost:
            lost.add(made.phase)
            answer = ConnectionError("the worker is gone")
        runs.complete(made, answer)
    job = runs.job(job_id)
    assert lost == {"plan", "task", "publish"} and job.state == "succeeded", job.error
    check_target(runs, key, job.result)
    assert len(runs.all(select(checkpoints))) == 2


def test_two_publishers_at_once(runs: KindRuns, tmp_path: Path) -> None:
    """One that was believed dead publishes beside the other: both see one and the same target."""
    number = runs.id("main", "run/step-5")
    job_id = runs.submit("convert", checkpoint_id=number, to="dcp", target_root="export", target_key="x")
    for _ in range(2):
        made = runs.claim()
        assert made is not None
        runs.complete(made, runs.carry_out(made))
    made = runs.claim()
    assert made is not None and made.phase == "publish"
    first, second = runs.carry_out(made), runs.carry_out(made)
    assert first["target"]["save_id"] == second["target"]["save_id"]
    runs.complete(made, second)
    runs.drain()
    assert runs.job(job_id).state == "succeeded"
    assert verify_store(OpenWith()(tmp_path / "export/x")).findings == []


def test_a_cancelled_one_leaves_nothing(any_runs: KindRuns, tmp_path: Path) -> None:
    """What its tasks wrote is cleared away, and the place is free again."""
    runs = any_runs
    number = runs.id("main", "run/step-5")
    params: dict[str, Any] = {"checkpoint_id": number, "to": "safetensors", "target_root": "export"}
    params["target_key"] = "a/x.safetensors"
    job_id = runs.submit("convert", **params)
    for _ in range(2):
        made = runs.claim()
        assert made is not None
        runs.complete(made, runs.carry_out(made))
    runs.database.transact(lambda connection: request_cancel(connection, job_id, 0.0, "test"))
    runs.drain()
    assert runs.job(job_id).state == "cancelled"
    root = runs.roots.get("export")
    assert root.store("a").list() == []
    if root.is_local:
        assert list((tmp_path / "export/a").iterdir()) == []
    again = runs.do("convert", **params)
    assert again.state == "succeeded" and again.id != job_id


@contextmanager
def before_each(kind: str, act: Callable[[int], object]) -> Iterator[None]:
    """``act`` is called with a number before each change of storage of a ``kind``."""
    numbers = count()

    def observer(op: str, _: str) -> None:
        if op == kind:
            act(next(numbers))

    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def task_of(runs: KindRuns, **params: Any) -> tuple[int, Claim]:
    """A conversion that is planned, and the task that it has."""
    job_id = runs.submit("convert", **params)
    made = runs.claim()
    assert made is not None
    runs.complete(made, runs.carry_out(made))
    task = runs.claim()
    assert task is not None and task.phase == "task"
    return job_id, task


def test_one_that_was_killed_before_it_noted_its_object_blocks_no_other(s3_runs: KindRuns) -> None:
    """The file has appeared, and no note says whose it is: it is cleared away all the same."""
    runs = s3_runs
    params: dict[str, Any] = {"to": "torch", "target_root": "export", "target_key": "a/x.pt"}
    params["checkpoint_id"] = runs.id("main", "run/step-5")
    job_id, task = task_of(runs, **params)

    def die(number: int) -> None:
        if number == 1:  # before it is 0
            raise KeyboardInterrupt

    with before_each("ledger", die), pytest.raises(KeyboardInterrupt):
        runs.carry_out(task)
    store = runs.roots.get("export").store("a")
    assert [info.name for info in store.list() if info.name == "x.pt"]
    runs.database.transact(lambda connection: request_cancel(connection, job_id, 0.0, "test"))
    runs.complete(task, ConnectionError("the worker is gone"))
    runs.drain()
    assert runs.job(job_id).state == "cancelled"
    assert store.list() == []
    again = runs.do("convert", **params)
    assert again.state == "succeeded", again.error
    check_target(runs, "a/x.pt", again.result)


def test_an_object_that_came_into_being_meanwhile_stays(s3_runs: KindRuns) -> None:
    """It is as large as what was to be there, and of nobody known."""
    runs = s3_runs
    params: dict[str, Any] = {"to": "torch", "target_root": "export", "target_key": "a/x.pt"}
    params["checkpoint_id"] = runs.id("main", "run/step-5")
    sizes = runs.do("convert", **params | {"target_key": "b/x.pt"}).result
    assert sizes is not None
    job_id, task = task_of(runs, **params)
    store, theirs = runs.roots.get("export").store("a"), bytes(sizes["target"]["bytes"])
    with before_each("finish", lambda _: store.publish("x.pt", theirs, durable=True)):
        answer = runs.carry_out(task)
    assert isinstance(answer, Exception)
    runs.complete(task, answer)
    runs.drain()
    assert runs.job(job_id).state == "failed"
    assert store.read("x.pt", limit_bytes=len(theirs)) == theirs
    assert [info.name for info in store.list()] == ["x.pt"]


def test_what_is_there_stays(runs: KindRuns, tmp_path: Path) -> None:
    """A file that the catalog does not know fails the job; it is as it was, and only it is there."""
    (tmp_path / "export/x.pt").write_bytes(b"mine")
    number = runs.id("main", "run/step-5")
    job = runs.do("convert", checkpoint_id=number, to="torch", target_root="export", target_key="x.pt")
    assert job.state == "failed" and job.error is not None
    assert job.error["type"] == "ConflictError" and not job.error["is_retryable"]
    assert "export:x.pt exists" in job.error["detail"] and str(tmp_path) not in job.error["detail"]
    assert (tmp_path / "export/x.pt").read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["x.pt"]


def test_a_damaged_source_makes_no_target(runs: KindRuns, tmp_path: Path) -> None:
    """Checksums are compared on the way; what was written is cleared away."""
    path = next((tmp_path / "main/run/step-5").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    number = runs.id("main", "run/step-5")
    job = runs.do("convert", checkpoint_id=number, to="torch", target_root="export", target_key="x.pt")
    assert job.state == "failed" and job.error is not None
    assert "damaged" in job.error["detail"] and str(tmp_path) not in job.error["detail"]
    assert list((tmp_path / "export").iterdir()) == []


_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target_root": "frozen"}, "read-only"),
    ({"target_root": "nowhere"}, "there is no root"),
    ({"target_key": "../x.pt"}, "not allowed"),
    ({"target_key": "/etc/x.pt"}, "not allowed"),
    ({"target_key": "a%2f..%2fx.pt"}, "not allowed"),
    ({"target_root": "main", "target_key": "run/step-5/x.pt"}, "in the source itself"),
    ({"target_root": "main", "target_key": "run/step-5", "to": "dcp"}, "in the source itself"),
    ({"target_root": "main", "target_key": "run/step-6/x.pt"}, "checkpoint already"),
]


def test_refused_targets(runs: KindRuns, tmp_path: Path) -> None:
    """They are refused before there is a job."""
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    runs.scan("main")
    given: dict[str, Any] = {"checkpoint_id": runs.id("main", "run/step-5"), "to": "torch"}
    given |= {"target_root": "export", "target_key": "x.pt"}
    for params, problem in _REFUSED:
        with pytest.raises(ProblemError, match=problem):
            runs.submit("convert", **(given | params))
    assert runs.all(select(jobs)) == []


@pytest.mark.parametrize(
    "params",
    [
        {"target_key": "x.safetensors"},
        {"target_key": "x"},
        {"target_key": ".hidden/x.pt"},
        {"target_key": "run/.x.pt"},
        {"to": "dcp", "target_key": "x.pt"},
        {"to": "numpy"},
        {"dtype": "int8"},
        {"rename": {"(": "x"}},
        {"rename": {"a": "\\9"}},
        {"shard_bytes": 1},
        {"files": 0},
        {"unknown": 1},
        {"only": []},
        {"tags": ["white space"]},
        {"map": "llama:hf-to-titn"},
        {"map": "/etc/passwd.json"},
        {"map": {"rules": []}},
        {"map": {"rules": [{"from": "a", "to": "b"}], "name": "x" * (300 << 10)}},
        {"inverse": True},
        {"below": "model"},
        {"sizes": {"heads": 2}},
        {"hf_key": "models/first"},
        {"hf_root": "main"},
        {"hf_also": ["*.py"]},
        {"map": "llama:hf-to-titan", "sizes": {"hedas": 2}},
        {"map": "llama:hf-to-titan", "sizes": {"inverse": 1}},
    ],
)
def test_parameters_that_cannot_be_meant(params: dict[str, Any]) -> None:
    """They are found when they are given, not when the job runs."""
    given: dict[str, Any] = {"checkpoint_id": 1, "to": "torch", "target_key": "x.pt"}
    ConvertParams.model_validate(given)
    with pytest.raises(ValidationError):
        ConvertParams.model_validate(given | params)


def test_expressions_are_not_searched_with_where_they_are_checked() -> None:
    """A request is refused or taken in no time, also if its expression takes for ever on an empty text."""
    bomb = "(?P<n>a?|b?|c?){16}(?=x)"  # a second and more
    begun = time.process_time()
    assert ConvertOptions(to="torch", rename={bomb: r"\g<n>-\1"}).rename == {bomb: r"\g<n>-\1"}
    for replacement in (r"\g<m>", r"\2"):
        with pytest.raises(ValueError, match="no regular expression"):
            ConvertOptions(to="torch", rename={bomb: replacement})
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    "piece",
    ["[!-\uffefa]", r"[\x01-\uffffa]", r"[\0-\U0010ffffa]", r"[\x01-\N{HALFWIDTH KATAKANA MIDDLE DOT}a]"],
)
@pytest.mark.parametrize("flags", ["", "(?i)"])
def test_large_sets_of_characters_are_not_compiled(piece: str, flags: str) -> None:
    """Each takes milliseconds to compile, and a request has room for thousands of them: half a minute of a
    process that answers others."""
    many = flags + piece * (1000 // len(piece))
    begun = time.process_time()
    with pytest.raises(ValidationError, match="characters together"):
        ConvertOptions(to="torch", rename={many + "|" * n: "x" for n in range(8)})
    assert time.process_time() - begun < 0.5
    plain = {
        r"[^\x00-\uffff]": "x",
        r"(?i)[\u0080-\U0010ffff]+": "y",
        "[a-z]+-[0-9]{2}": "z",
        r"layers-\d": "w",
    }
    assert ConvertOptions(to="torch", rename=plain).rename == plain


@pytest.mark.parametrize(
    ("rename", "fault"),
    [
        ({"(a+)+$": "b"}, "(a+)+$"),
        ({"x": "y", "(a|a)*(a|a)*c": "b"}, "(a|a)*"),
        (dict.fromkeys(["a", "a|b", "(?:a|b)", "[ab]"], "ab" * 500), "characters"),
    ],
)
def test_expressions_that_never_end_are_broken_off(
    rename: dict[str, str], fault: str, runs: KindRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the processor a bounded time, and the job fails once, naming the expression; nothing is left."""
    monkeypatch.setattr(renaming, "LIMIT_SECONDS", 0.5)
    dcp.save({"a" * 40 + "!": torch.ones(3)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    runs.scan("main")
    number = runs.id("main", "run/step-6")
    begun = time.process_time()
    job = runs.do("convert", checkpoint_id=number, to="torch", target_key="run/x.pt", rename=rename)
    assert time.process_time() - begun < 10.0
    assert job.state == "failed" and job.error is not None and not job.error["is_retryable"]
    assert job.error["type"] == "UnprocessableError" and fault in job.error["detail"]
    assert not list((tmp_path / "main/run").glob("*x.pt*"))


def test_names_are_changed_by_plain_expressions(runs: KindRuns, tmp_path: Path) -> None:
    """In order, with groups, as `dcp.convert` does it."""
    number = runs.id("main", "run/step-5")
    rename = {r"^(\w+)$": r"model.\1", r"model\.(?!bias)": "m."}
    runs.do("convert", checkpoint_id=number, to="torch", target_key="run/x.pt", rename=rename)
    loaded = torch.load(tmp_path / "main/run/x.pt", weights_only=True)
    assert set(loaded) == {"m.weight", "model.bias", "m.step"}


def test_only_what_is_committed_is_converted(runs: KindRuns, tmp_path: Path) -> None:
    """One that has vanished, say, is not."""
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "main/run/step-6", no_dist=True)
    runs.scan("main")
    for path in (tmp_path / "main/run/step-5").iterdir():
        path.unlink()
    runs.scan("main")
    with pytest.raises(StateError):
        runs.submit("convert", checkpoint_id=runs.id("main", "run/step-5"), to="torch", target_key="x.pt")


def test_one_conversion_to_a_target_at_a_time(runs: KindRuns) -> None:
    """Whoever asks for the same target joins the job that is at it."""
    number = runs.id("main", "run/step-5")
    params: dict[str, Any] = {"checkpoint_id": number, "to": "torch", "target_key": "x.pt"}
    assert runs.submit("convert", **params) == runs.submit("convert", **params, target_root="main")


def test_through_a_weight_map(runs: KindRuns, tmp_path: Path) -> None:
    """Given as data, and back; the catalog says which one it was."""
    number = runs.id("main", "run/step-5")
    rules = [
        {"from": {"weight": "(two rows) width"}, "to": {"turned": "width (rows two)"}},
        {"from": "{name:*}", "to": "{name:*}"},
    ]
    given = {"to": "dcp", "target_root": "export", "map": {"name": "turn", "rules": rules}}
    job = runs.do("convert", checkpoint_id=number, target_key="there", sizes={"two": 2}, **given)
    assert job.state == "succeeded" and job.result is not None, job.error
    assert job.result["map"] == "turn"
    wanted = _STATE["weight"].view(2, 10, 30).permute(2, 1, 0).reshape(30, 20)
    assert torch.equal(dcp.read(tmp_path / "export/there")["turned"], wanted)
    told = runs.all(select(audit.c.detail).where(audit.c.action == "checkpoint.convert"))
    assert [one.detail["map"] for one in told] == ["turn"]
    there = runs.id("export", "there")
    with runs.database.read() as connection:
        (edge,) = lineage_of(connection, there).edges
    assert (edge.kind, edge.map) == ("converted_from", "turn")
    back = runs.do("convert", checkpoint_id=there, target_key="back", sizes={"two": 2}, inverse=True, **given)
    assert back.state == "succeeded" and back.result is not None, back.error
    assert back.result["map"] == "turn (inverse)"
    found = dcp.read(tmp_path / "export/back")
    assert torch.equal(found["weight"], _STATE["weight"])
    assert found["step"] == 5
    assert runs.do("convert", checkpoint_id=number, target_key="no", **given).state == "failed"
    other = runs.do(
        "convert", checkpoint_id=number, target_key="no", sizes={"two": 2}, below="model", **given
    )
    assert other.state == "failed" and "no rule knows 'weight'" in str(other.error)
    assert not (tmp_path / "export/no").exists()


def test_a_whole_folder_of_hugging_face(runs: KindRuns, tmp_path: Path) -> None:
    """From a template in a root that the caller sees: known files of it, and nothing else."""
    number = runs.id("main", "run/step-5")
    template = tmp_path / "main" / "models" / "first"
    template.mkdir(parents=True)
    files = {"config.json": b'{"dtype": "bfloat16"}', "tokenizer.json": b"x" * 100_000, "merges.txt": b""}
    for name, data in {**files, "evil.py": b"1 / 0", "model.bin": b"evil"}.items():
        (template / name).write_bytes(data)
    (template / "vocab.txt").symlink_to("/etc/passwd")
    given: dict[str, Any] = {"checkpoint_id": number, "to": "safetensors", "target_root": "export"}
    job = runs.do("convert", target_key="whole", hf_key="models/first", **given)
    assert job.state == "succeeded" and job.result is not None, job.error
    made = tmp_path / "export" / "whole"
    assert {path.name for path in made.iterdir()} == {"model.safetensors", *files}
    assert {name: (made / name).read_bytes() for name in files} == files
    assert torch.equal(dcp.read(made)["weight"], _STATE["weight"])
    below = template / "additional_chat_templates"
    below.mkdir()
    (below / "tools.jinja").write_text("tools")
    (template / "linked").symlink_to("/etc")
    (template / "~odd").mkdir()
    (template / "~odd" / "tokenizer.json").write_text("x")
    job = runs.do("convert", target_key="code", hf_key="models/first", hf_also=["*.py"], **given)
    assert job.state == "succeeded", job.error
    made = tmp_path / "export" / "code"
    paths = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert paths == {"model.safetensors", "evil.py", "additional_chat_templates/tools.jinja", *files}
    for wrong in ({"hf_root": "nowhere"}, {"hf_key": "../export"}):
        with pytest.raises(ProblemError):
            runs.submit("convert", target_key="no", **{"hf_key": "models/first", **given, **wrong})
    job = runs.do("convert", target_key="no", hf_key="run", **given)
    assert job.state == "failed" and "config.json" in str(job.error)
    assert not (tmp_path / "export" / "no").exists()
