"""Registration behind training: whatever the catalog does, training goes on, and nothing is lost."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.manager.catalog import registration
from dcp.manager.catalog.registration import CatalogRegistration, Registrar
from dcp.manager.catalog.spool import Note, Spool
from tests.support.ports import refusing_port
from tests.support.programs import run_program
from tests.support.scripted_service import Answer, Asked, scripted_service

HANG_SECONDS = 120.0
STATE = {"w": torch.ones(4)}


def spooled(folder: Path) -> list[dict[str, Any]]:
    """The notes that wait on disk, in order."""
    paths = sorted(folder.rglob("[0-9]*.json"))
    return [json.loads(path.read_bytes()) for path in paths]


def name_of(step: int) -> str:
    """What a folder is called."""
    return f"step-{step}"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens."""
    with refusing_port() as port:
        yield port


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told to come back comes at once."""
    monkeypatch.setattr(registration, "_LONGEST_PAUSE_SECONDS", 0.02)


def registrar(url: str, folder: Path, **options: Any) -> Registrar:
    """One of a run whose spool is ``folder``."""
    given: dict[str, Any] = {"spool": folder, "close_seconds": 0.0, **options}
    return Registrar(CatalogRegistration(url, **given), "s3://bucket/run", name_of)


def test_a_run_is_registered(tmp_path: Path) -> None:
    """Each commit and each deletion, with where it is, step, save id and tags, by the key; once it has
    arrived nothing is left on disk."""
    with scripted_service() as service:
        catalog = dcp.CatalogRegistration(service.url, key="dcp_secret", tags=("nightly",))
        with dcp.CheckpointManager(tmp_path, keep=dcp.Retention(last=1), catalog=catalog) as manager:
            for step in (1, 2):
                manager.save(step, STATE, metrics={"loss": 0.5}, force=True)
                assert manager.wait(HANG_SECONDS)
        bodies = service.bodies()
        assert {asked.path for asked in service.asked} == {"/api/v1/checkpoints"}
        assert {asked.headers["Authorization"] for asked in service.asked} == {"Bearer dcp_secret"}
    saved = [body for body in bodies if "save_id" in body]
    assert [body["key"] for body in saved] == ["step-00000001", "step-00000002"]
    ids = [dcp.open_index(tmp_path / "step-00000002").provenance["save_id"]]
    assert saved[1] == {
        "root_url": str(tmp_path),
        "key": "step-00000002",
        "step": 2,
        "save_id": ids[0],
        "tags": ["nightly"],
    }
    assert [body for body in bodies if body.get("deleted")] == [
        {"root_url": str(tmp_path), "key": "step-00000001", "step": 1, "deleted": True}
    ]
    assert spooled(tmp_path) == []


def test_by_the_name_of_a_root(tmp_path: Path) -> None:
    """The service may see the storage elsewhere: then root and folder say where the run is."""
    with scripted_service() as service:
        catalog = dcp.CatalogRegistration(service.url, root="prod", folder="/llama/7/")
        with dcp.CheckpointManager(tmp_path, mode="sync", catalog=catalog) as manager:
            manager.save(3, STATE, force=True)
        assert [(body["root"], body["key"]) for body in service.bodies()] == [
            ("prod", "llama/7/step-00000003")
        ]
        assert "Authorization" not in service.asked[0].headers


def test_a_catalog_that_is_away(tmp_path: Path, closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Saves and close succeed, one warning tells of it, the note stays, and the next manager sends it."""
    url = f"http://127.0.0.1:{closed_port}"
    options: dict[str, Any] = {"close_seconds": 0.5, "spool": tmp_path / "spool"}
    with (
        caplog.at_level(logging.WARNING, "dcp.manager.catalog.registration"),
        dcp.CheckpointManager(tmp_path / "run", catalog=dcp.CatalogRegistration(url, **options)) as manager,
    ):
        for step in (1, 2):
            manager.save(step, STATE, force=True)
    assert manager.all_steps() == [1, 2]
    assert [body["step"] for body in spooled(tmp_path)] == [1, 2]
    assert sum("cannot be told" in record.message for record in caplog.records) <= 1
    assert sum("next manager" in record.message for record in caplog.records) == 1
    with scripted_service() as service:
        again = dcp.CatalogRegistration(service.url, **options | {"close_seconds": HANG_SECONDS})
        with dcp.CheckpointManager(tmp_path / "run", catalog=again):
            pass
        assert [body["step"] for body in service.bodies()] == [1, 2]
    assert spooled(tmp_path) == []


def test_a_catalog_that_hangs(tmp_path: Path) -> None:
    """A request without an answer holds up neither saves nor, beyond its bound, close."""
    with scripted_service(lambda asked: Answer(hang=True)) as service:
        catalog = dcp.CatalogRegistration(service.url, request_seconds=60, close_seconds=0.2)
        with dcp.CheckpointManager(tmp_path, catalog=catalog) as manager:
            for step in range(1, 4):
                future = manager.save(step, STATE, force=True)
                assert future is not None
                future.result(HANG_SECONDS)
            service.wait_for(1)
        assert len(service.asked) == 1
    assert [body["step"] for body in spooled(tmp_path)] == [1, 2, 3]


def test_a_trainer_that_is_killed(tmp_path: Path, closed_port: int) -> None:
    """What was committed while the catalog was away survives SIGKILL, and is sent by the next start."""
    script = f"""
import os, signal, time, torch, dcp
from pathlib import Path
catalog = dcp.CatalogRegistration("http://127.0.0.1:{closed_port}", spool={str(tmp_path / "spool")!r})
manager = dcp.CheckpointManager({str(tmp_path / "run")!r}, catalog=catalog)
manager.save(7, {{"w": torch.ones(2)}}, force=True).result()
deadline = time.monotonic() + 60
while not list(Path({str(tmp_path / "spool")!r}).glob("[0-9]*.json")) and time.monotonic() < deadline:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_program("-c", script).returncode == -9
    with scripted_service() as service:
        sender = registrar(service.url, tmp_path / "spool")
        assert sender.wait(HANG_SECONDS)
        sender.close()
        assert [(body["key"], body["root_url"]) for body in service.bodies()] == [
            ("step-00000007", str(tmp_path / "run"))
        ]


@pytest.mark.usefixtures("no_pauses")
def test_it_is_tried_again(tmp_path: Path) -> None:
    """Errors of the service, and a checkpoint that it does not see yet, are asked about again, in order."""
    statuses = iter([503, 429, 404, 409, 201])
    with scripted_service(lambda asked: Answer(next(statuses), headers={"Retry-After": "0"})) as service:
        sender = registrar(service.url, tmp_path)
        sender._put(5, {})
        assert sender.wait(HANG_SECONDS)
        sender.close()
        assert len(service.asked) == 5
        assert {json.dumps(body) for body in service.bodies()} == {json.dumps(service.bodies()[0])}
    assert spooled(tmp_path) == []


def test_what_is_refused_is_let_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A note that the service does not take is logged with its reason and removed; the next one is sent."""

    def answer(asked: Asked) -> Answer:
        return Answer(422, {"detail": "not such a key"}) if asked.body["step"] == 1 else Answer(200)

    with scripted_service(answer) as service:
        sender = registrar(service.url, tmp_path)
        with caplog.at_level(logging.WARNING, "dcp.manager.catalog.registration"):
            sender._put(1, {})
            sender._put(2, {})
            assert sender.wait(HANG_SECONDS)
        sender.close()
        assert [body["step"] for body in service.bodies()] == [1, 2]
    assert "not such a key" in caplog.text
    assert spooled(tmp_path) == []


@pytest.mark.usefixtures("no_pauses")
def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """The key goes to the service that was named, and to no other."""
    with scripted_service() as other:
        redirect = Answer(307, headers={"Location": f"{other.url}/api/v1/checkpoints"})
        with scripted_service(lambda asked: redirect) as service:
            sender = registrar(service.url, tmp_path, key="dcp_secret")
            sender._put(1, {})
            service.wait_for(2)
            sender.close()
        assert other.asked == []
    assert len(spooled(tmp_path)) == 1


def test_only_the_last_of_a_checkpoint(tmp_path: Path, closed_port: int) -> None:
    """A deletion makes the note of the commit moot, if that has not been sent yet."""
    sender = registrar(f"http://127.0.0.1:{closed_port}", tmp_path)
    for step in (1, 2):
        sender._put(step, {"save_id": "a"})
    sender._put(1, {"deleted": True})
    sender.close()
    assert [(body["step"], body.get("deleted")) for body in spooled(tmp_path)] == [(2, None), (1, True)]


def test_the_spool_is_bounded(tmp_path: Path, closed_port: int) -> None:
    """Of too many notes the oldest go, in memory and on disk."""
    sender = registrar(f"http://127.0.0.1:{closed_port}", tmp_path, spool_notes=3)
    for step in range(10):
        sender._put(step, {})
    sender.close()
    assert [body["step"] for body in spooled(tmp_path)] == [7, 8, 9]


def test_a_spool_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then notes are in memory only, and are sent all the same."""
    (tmp_path / "file").write_bytes(b"")
    with scripted_service() as service:
        sender = registrar(service.url, tmp_path / "file" / "spool")
        sender._put(1, {})
        assert sender.wait(HANG_SECONDS)
        sender.close()
        assert [body["step"] for body in service.bodies()] == [1]
    assert "in memory only" in caplog.text


def test_rests_in_a_spool(tmp_path: Path) -> None:
    """Of half-written, foreign and damaged files none is sent, and damaged notes are removed."""
    spool = Spool(tmp_path, 100)
    good = Note({"key": "step-1"})
    spool.add([good])
    assert good.path is not None
    name = good.path.name
    (tmp_path / f".tmp-{name}").write_bytes(b"{")
    os.utime(tmp_path / f".tmp-{name}", (1e9, 1e9))
    (tmp_path / "notes.txt").write_bytes(b"mine")
    for number, data in enumerate((b"", b"{", b"[]", b'{"key": 7}', b"\xff" * 70_000)):
        (tmp_path / f"{number:020d}-0000abcd-000000.json").write_bytes(data)
    loaded = Spool(tmp_path, 100).load()
    assert [note.body for note in loaded] == [{"key": "step-1"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "notes.txt"])


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("localhost:8470", {}),
        ("ftp://host/", {}),
        ("http://", {}),
        ("http://host", {"folder": "a"}),
        ("http://host", {"spool_notes": 0}),
        ("http://host", {"key": "s\u00fcss-secret"}),
    ],
)
def test_what_cannot_be_meant(url: str, options: dict[str, Any]) -> None:
    """Is refused when the manager is made; the key is in no message."""
    with pytest.raises(ValueError, match="catalog") as caught:
        CatalogRegistration(url, **options)
    assert "secret" not in str(caught.value)


def test_the_key_is_not_shown() -> None:
    """Neither in a repr nor in what is logged of one."""
    assert "dcp_secret" not in repr(CatalogRegistration("http://host", key="dcp_secret"))


def test_the_key_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is given it is DCP_CATALOG_KEY, which scripts need not know."""
    monkeypatch.setenv("DCP_CATALOG_KEY", "dcp_fromenv")
    with scripted_service() as service:
        sender = registrar(service.url, tmp_path)
        sender._put(1, {})
        assert sender.wait(HANG_SECONDS)
        sender.close()
        assert service.asked[0].headers["Authorization"] == "Bearer dcp_fromenv"
