"""A trainer says where a checkpoint is, and the catalog has what is there; on both databases."""

from __future__ import annotations

import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.events import events_after
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.problems import ConflictError, NotFoundError, ProblemError, UnprocessableError
from dcp.server.records.checkpoints import Registered
from dcp.server.roots import Roots
from dcp.server.scanning.registering import Registration, register, resolve
from dcp.server.settings import RootSettings
from tests.support.catalog_roots import rows, scan, write_manifest


@pytest.fixture
def places(tmp_path: Path) -> Roots:
    """A root, one within it, and one on S3 that nobody asks for anything."""
    (tmp_path / "main" / "inner").mkdir(parents=True)
    return Roots(
        {
            "main": RootSettings(url=str(tmp_path / "main")),
            "inner": RootSettings(url=f"file://{tmp_path}/main/inner/"),
            "bucket": RootSettings(url="s3://bucket/runs/"),
        }
    )


@pytest.fixture
def roots(places: Roots, database: Database) -> Roots:
    """The roots, known to the catalog."""
    with database.write() as connection:
        sync_roots(connection, {root.name: root.url for root in places})
    return places


def say(database: Database, roots: Roots, key: str, **more: Any) -> Registered:
    """A registration by a trainer."""
    given = {"root": "main", **more} if "root_url" not in more else more
    return register(database, roots, Registration(key=key, **given), actor="key:trainer")


def test_it_is_read_by_the_server(database: Database, roots: Roots, tmp_path: Path) -> None:
    """Facts are those of the manifest; step counts where it says none; tags and metrics are added."""
    write_manifest(tmp_path / "main" / "run" / "last", save_id="a", user={"metrics": {"loss": 2.0}})
    found = say(database, roots, "run/last", step=7, tags=frozenset({"t"}), metrics={"acc": 0.5}, save_id="b")
    assert (found.is_new, found.is_present, found.save_id) == (True, True, "a")
    with database.read() as connection:
        detail = get_checkpoint(connection, found.id or 0)
    assert (detail.step, detail.bytes, detail.format) == (7, 192, "dcp")
    assert dict(detail.metrics) == {"loss": 2.0, "acc": 0.5}
    assert list(detail.tags) == ["t"]


def test_twice_and_by_the_scanner(database: Database, roots: Roots, tmp_path: Path) -> None:
    """It may be said again, and found by a scan before or after: one row, one event."""
    write_manifest(tmp_path / "main" / "run" / "step-1", seconds=None)
    first = say(database, roots, "run/step-1")
    again = say(database, roots, "run/step-1")
    assert (first.is_new, again.is_new, again.id) == (True, False, first.id)
    version = rows(database)["run/step-1"]["version"]
    scan(database, roots)
    assert rows(database)["run/step-1"]["version"] == version
    with database.read() as connection:
        kinds = [event.kind for event in events_after(connection, 0, 100)]
    assert kinds == ["checkpoint.committed"]


def test_a_step_that_the_checkpoint_says_counts(database: Database, roots: Roots, tmp_path: Path) -> None:
    """The trainer's word is not taken for what the manifest says."""
    write_manifest(tmp_path / "main" / "run" / "step-1", user={"step": 5})
    say(database, roots, "run/step-1", step=9)
    assert rows(database)["run/step-1"]["step"] == 5


def test_what_is_not_committed(database: Database, roots: Roots, tmp_path: Path) -> None:
    """Nothing there is not found; data without a commit is a conflict, to be said again later."""
    with pytest.raises(NotFoundError):
        say(database, roots, "run/step-1")
    folder = tmp_path / "main" / "run" / "step-1"
    folder.mkdir(parents=True)
    (folder / "__0_0.0000abcd.distcp").write_bytes(b"x")
    with pytest.raises(ConflictError):
        say(database, roots, "run/step-1")
    assert rows(database) == {}
    write_manifest(folder)
    assert say(database, roots, "run/step-1").is_new


def test_a_deletion(database: Database, roots: Roots, tmp_path: Path) -> None:
    """Is believed only as far as the storage bears it out; one of what nobody knew is fine."""
    folder = tmp_path / "main" / "run" / "step-1"
    write_manifest(folder)
    say(database, roots, "run/step-1")
    still = say(database, roots, "run/step-1", deleted=True)
    assert still.is_present
    assert rows(database)["run/step-1"]["state"] == "committed"
    shutil.rmtree(folder)
    gone = say(database, roots, "run/step-1", deleted=True)
    assert not gone.is_present
    assert rows(database)["run/step-1"]["state"] == "vanished"
    assert say(database, roots, "run/step-2", deleted=True).id is None


def test_a_deletion_beside_a_new_save(database: Database, roots: Roots, tmp_path: Path) -> None:
    """What is saved and registered anew while somebody looks, and finds nothing, is not marked as gone."""
    folder = tmp_path / "main" / "run" / "step-1"
    write_manifest(folder)
    say(database, roots, "run/step-1")
    shutil.rmtree(folder)
    times = count(time.time() + 10.0)

    def clock() -> float:
        """Whenever the deletion asks for the time, the new save has just been told of."""
        write_manifest(folder, save_id="0000beef")
        register(database, roots, saved, actor="key:other", clock=lambda: next(times))
        return next(times)

    saved = Registration(root="main", key="run/step-1")
    gone = Registration(root="main", key="run/step-1", deleted=True)
    assert register(database, roots, gone, actor="key:trainer", clock=clock).is_present
    row = rows(database)["run/step-1"]
    assert (row["state"], row["save_id"]) == ("committed", "0000beef")


def test_a_damaged_one_is_noted(database: Database, roots: Roots, tmp_path: Path) -> None:
    """As by a scan: unreadable, with the reason."""
    path = write_manifest(tmp_path / "main" / "run" / "step-1")
    path.write_bytes(path.read_bytes()[:-9])
    assert not say(database, roots, "run/step-1").is_present
    row = rows(database)["run/step-1"]
    assert row["state"] == "unreadable" and "checksum" in row["problem"]
    assert str(tmp_path) not in row["problem"]


def test_files_and_folders_of_weights(database: Database, roots: Roots, tmp_path: Path) -> None:
    """Whatever a scan would find can be registered."""
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "main" / "hub").mkdir()
    for path in (tmp_path / "main" / "hub" / "model.safetensors", tmp_path / "main" / "alone.safetensors"):
        save_file({"w": np.ones(3, np.float32)}, path)
    for key in ("hub", "alone.safetensors"):
        assert say(database, roots, key).is_new
    assert {row["format"] for row in rows(database).values()} == {"safetensors"}


@pytest.mark.parametrize(
    ("url", "key", "found"),
    [
        ("{main}/run", "step-1", ("main", "run/step-1")),
        ("file://{main}/run", "step-1", ("main", "run/step-1")),
        ("{main}/run/", "step-1", ("main", "run/step-1")),
        ("{main}/inner/run", "step-1", ("inner", "run/step-1")),
        ("{main}", "step-1", ("main", "step-1")),
        ("s3://bucket/runs/a", "step-1", ("bucket", "a/step-1")),
        ("s3a://bucket/runs", "step-1", ("bucket", "step-1")),
        ("S3://bucket/runs/a/", "step-1", ("bucket", "a/step-1")),
    ],
)
def test_the_root_of_a_url(places: Roots, tmp_path: Path, url: str, key: str, found: tuple[str, str]) -> None:
    """Trainers know a path or a URL: it is in the innermost root that holds it."""
    root, inner = resolve(places, Registration(key=key, root_url=url.format(main=tmp_path / "main")))
    assert (root.name, inner) == found


@pytest.mark.parametrize(
    "url",
    [
        "/etc",
        "s3://bucket/runs-of-others",
        "s3://bucket",
        "relative",
        "",
        "{main}x/run",
        "{main}/../x",
        "{main}/out",
    ],
)
def test_urls_outside(places: Roots, tmp_path: Path, url: str) -> None:
    """What is in no root is not found; a link that leads out of one neither."""
    (tmp_path / "main" / "out").symlink_to("/usr")
    with pytest.raises(NotFoundError):
        resolve(places, Registration(key="step-1", root_url=url.format(main=tmp_path / "main")))


@pytest.mark.parametrize("key", ["../step-1", "/etc/x", "a//b", "", "a\\b", "a%2e%2e/..%2f", "s3://b/x"])
def test_keys_that_lead_elsewhere(places: Roots, tmp_path: Path, key: str) -> None:
    """Are refused, by name and by URL alike."""
    for place in ({"root": "main"}, {"root_url": str(tmp_path / "main" / "inner")}):
        with pytest.raises(UnprocessableError):
            resolve(places, Registration(key=key, **place))  # type: ignore[arg-type]


def test_only_visible_roots(database: Database, roots: Roots, tmp_path: Path) -> None:
    """For a key that is restricted to other roots there is no such root."""
    write_manifest(tmp_path / "main" / "run" / "step-1")
    for place in ({"root": "main"}, {"root_url": str(tmp_path / "main" / "run")}):
        with pytest.raises(ProblemError) as caught:
            register(
                database,
                roots,
                Registration(key="run/step-1", **place),  # type: ignore[arg-type]
                actor="a",
                visible=frozenset({"inner"}),
            )
        assert caught.value.status == 404
    with pytest.raises(UnprocessableError):
        resolve(roots, Registration(key="a"))
