"""What a scan passes over is counted with its reason, and links are followed as far as the root goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp
from dcp.server.catalog.roots import root_row
from dcp.server.database.engine import Database
from dcp.server.roots import StorageRoot
from dcp.server.scanning.registering import Registration, register
from dcp.server.scanning.walk import MAX_DEPTH
from dcp.storage.stores.memory import MemoryStore
from tests.support.catalog_roots import age, roots_of, rows, scan, write_manifest

STATE = {"w": torch.arange(8.0)}


def states(database: Database) -> dict[str, str]:
    """The state of each checkpoint, by key."""
    return {key: row["state"] for key, row in rows(database).items()}


def test_names_are_counted_with_reasons(database: Database, tmp_path: Path) -> None:
    """Names that no key can have, what lies too deep and what is too long: so many of each, with an example
    that steers no terminal; that is no failure of the scan."""
    write_manifest(tmp_path / "run" / "step-1")
    for name in ("two\nlines", "\x1b[2Jansi", "back\\slash", "%2e%2e", "~home", "a::b"):
        write_manifest(tmp_path / name / "step-1")
    (tmp_path / "run" / "new\nline.pt").write_bytes(b"x")
    write_manifest(tmp_path.joinpath(*["deep"] * (MAX_DEPTH + 1), "step-1"))
    long = tmp_path.joinpath(*["l" * 200] * 5)
    write_manifest(long / ("m" * 100))
    report = scan(database, roots_of(tmp_path))
    assert list(states(database)) == ["run/step-1"]
    found = {line.removeprefix("passed over: ").partition(", such as ")[0] for line in report.trouble}
    assert found == {
        "names that are no keys: it has control characters, or is no Unicode text: 3",
        "names that are no keys: each part between its slashes must be a plain name of up to 255 bytes: 2",
        "names that are no keys: URLs and chains of them are no keys: 1",
        "names that are no keys: no part may end in ':' or begin with '~': 1",
        f"more than {MAX_DEPTH} folders deep: 1",
        "keys of more than 1024 characters: 1",
    }
    assert "\x1b" not in "".join(report.trouble) and "\n" not in "".join(report.trouble)
    with database.read() as connection:
        row = root_row(connection, "main")
    assert row.scan_error is None
    assert row.scan_state["trouble"] == report.trouble


def test_names_of_objects(database: Database, tmp_path: Path) -> None:
    """Of an object store the same; one such name does not end the scan."""
    place = f"memory://passed-{tmp_path.name}"
    source = tmp_path / "step-1"
    dcp.save(STATE, checkpoint_id=source, no_dist=True)
    for key in ("run/step-1", "new\nline/step-1", "a\\b/step-2", ".hidden/step-1"):
        store = MemoryStore(f"{place.removeprefix('memory://')}/{key}")
        for path in source.iterdir():
            with store.create(path.name, durable=False) as file:
                file.write(path.read_bytes())
    report = scan(database, roots_of(place))
    assert list(states(database)) == ["run/step-1"]
    assert [line.rpartition(": ")[2].partition(",")[0] for line in report.trouble] == ["1", "1"]


def _hub(folder: Path) -> Path:
    """As the cache of a model hub: a snapshot of links to blobs without names."""
    snapshot = folder / "models--org--name" / "snapshots" / ("ab" * 20)
    blobs = folder / "models--org--name" / "blobs"
    for each in (snapshot, blobs):
        each.mkdir(parents=True)
    save_file(STATE, blobs / "0123abcd")
    (blobs / "4567ef").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    (snapshot / "config.json").symlink_to("../../blobs/4567ef")
    return snapshot


def test_the_cache_of_a_model_hub(database: Database, tmp_path: Path) -> None:
    """Its snapshots are checkpoints, found by scans and told by trainers, and can be read; not opened again
    while nothing changes."""
    snapshot = _hub(tmp_path)
    age(tmp_path)
    roots = roots_of(tmp_path)
    report = scan(database, roots)
    key = str(snapshot.relative_to(tmp_path))
    assert (states(database), report.trouble) == ({key: "committed"}, [])
    row = rows(database)[key]
    assert (row["format"], row["step"], row["bytes"] > 32) == ("safetensors", None, True)
    assert scan(database, roots).opened == 0
    assert not register(database, roots, Registration(root="main", key=key), actor="t").is_new
    assert scan(database, roots).opened == 0
    source = roots.get("main").source(key)
    assert source.index.shape(0) == (8,)
    assert source.store.stat("model.safetensors") == source.store.list()[1]
    with source.store.open_read("model.safetensors") as handle:
        assert handle.size_bytes == row["bytes"]


def test_links_that_stay_within(database: Database, tmp_path: Path) -> None:
    """What is found anyway is not found by a link's name, too; what is not, is; there are no circles."""
    for key in ("run/step-1", "run/step-2", ".store/moved/step-7"):
        write_manifest(tmp_path / key)
    save_file(STATE, tmp_path / "run" / "epoch-3.safetensors")
    torch.save(STATE, tmp_path / ".store" / "blob")
    links = {
        "run/latest": "step-2",
        "run/last.safetensors": "epoch-3.safetensors",
        "all": ".",
        "run/up": "..",
        "moved": ".store/moved",
        "again": ".store/moved",
        ".store/moved/back": "..",
        "best.pt": ".store/blob",
        "round": "about",
        "about": "round",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    age(tmp_path / "run")
    report = scan(database, roots_of(tmp_path))
    assert states(database) == dict.fromkeys(
        ["again/step-7", "best.pt", "run/epoch-3.safetensors", "run/step-1", "run/step-2"], "committed"
    )
    assert report.trouble == ["passed over: links that lead in a circle: 2, such as 'about'"]
    source = roots_of(tmp_path).get("main").source("best.pt")
    assert source.index.format == "torch_save"


def test_links_that_lead_out(database: Database, tmp_path: Path) -> None:
    """They are counted and not followed. Of a checkpoint or a run in whose place one is now nothing is known:
    it has not vanished."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for key in ("a/step-1", "a/step-2", "b/step-1", "c/step-1"):
        write_manifest(root / key)
    save_file(STATE, tmp_path / "secret.safetensors")
    roots = roots_of(root)
    scan(database, roots)
    outside.mkdir()
    for key in ("a/step-1", "b"):
        shutil.move(root / key, outside / key.replace("/", "-"))
        (root / key).symlink_to(outside / key.replace("/", "-"))
    (root / "c" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (root / "c" / "gone.pt").symlink_to("nothing")
    (root / "c" / "notes.txt").symlink_to(tmp_path / "secret.safetensors")
    report = scan(database, roots)
    assert set(states(database).values()) == {"committed"}
    assert (report.found, report.vanished, report.lost) == (2, 0, 0)
    assert [line.partition(", such")[0] for line in report.trouble] == [
        "passed over: links that lead nowhere: 1",
        "passed over: links that lead out of the root, which are not followed: 3",
    ]
    assert str(tmp_path) not in "".join(report.trouble)
    store = StorageRoot("main", roots.get("main").settings).store("c")
    assert "model.safetensors" not in [info.name for info in store.list()]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_that_is_exchanged_meanwhile(tmp_path: Path, what: str) -> None:
    """However often and whenever it is pointed elsewhere, nothing outside is read."""
    import threading

    from dcp.storage.errors import CheckpointError
    from dcp.storage.stores import PosixStore

    for place, content in (("root/in", b"inside"), ("out", b"secret")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "data").write_bytes(content)
    link, spare = tmp_path / "root" / "link", tmp_path / "root" / "spare"
    ending = "/data" if what == "file" else ""
    targets = [f"{tmp_path}/root/in{ending}", f"{tmp_path}/out{ending}"]
    link.symlink_to(targets[0])
    done = threading.Event()

    def exchange() -> None:
        for number in range(200_000):
            if done.is_set():
                return
            spare.symlink_to(targets[number % 2])
            os.replace(spare, link)  # noqa: PTH105 - in a loop that has to be quick

    store = PosixStore(tmp_path / "root" if what == "file" else link, links_within=tmp_path / "root")
    thread = threading.Thread(target=exchange)
    thread.start()
    seen: set[bytes] = set()
    try:
        for _ in range(3000):
            try:
                seen.add(store.read("link" if what == "file" else "data", limit_bytes=100))
            except CheckpointError:
                continue
    finally:
        done.set()
        thread.join()
    assert seen == {b"inside"}
