"""Nothing outside of the roots is read. Internal: hostile manifests, and links exchanged during a read.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.manager.cleanup.removal import remove_checkpoint
from dcp.server.problems import ProblemError, UnprocessableError
from dcp.server.roots import StorageRoot, check_key
from dcp.server.settings import RootSettings
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.stores import PosixStore
from tests.support.app import App, running_app
from tests.support.examples import examples
from tests.support.s3 import S3Server

SECRET = b"nobody-outside-may-see-this-0123456789"

BAD_KEYS = [
    "",
    ".",
    "..",
    "/",
    "//",
    "/etc/passwd",
    "../secret",
    "run/../../secret",
    "run/..",
    "run/.",
    "run//step",
    "run/",
    "./run",
    "..\\secret",
    "run\\..\\..\\secret",
    "C:\\secret",
    "C:",
    "\\\\host\\share",
    "run/\x00/step",
    "run\x00",
    "run\n",
    "run\r\nX-Header: y",
    "run\x7f",
    "run\x85",
    "run\u2028step",
    "\ud800",
    "run/\udcff",
    "%2e%2e/secret",
    "%2e%2e%2fsecret",
    "..%2fsecret",
    "..%5csecret",
    "%252e%252e%252fsecret",
    "%25252e%25252e/secret",
    "run%00",
    "run%2f..%2f..%2fsecret",
    "%2Fetc%2Fpasswd",
    "run/%0a",
    "run/%3a%3a/x",
    "%ff/../..",
    "simplecache::s3://bucket/x",
    "x::y",
    "file:///etc/passwd",
    "s3://bucket/key",
    "s3:/bucket/key",
    "http://127.0.0.1/",
    "run/https://elsewhere/x",
    "memory://x",
    "~",
    "~root/x",
    "run/.lock",
    ".lock",
    "x" * 1025,
    "a/" * 512 + "b",
    "x" * 256,
    "ü" * 200,
    f"%{'25' * 9}2e",
]

GOOD_KEYS = [
    "run",
    "run/step-1",
    "a b/c",
    "ü/日本",
    "100%",
    "50%25",
    "a=b&c?d#e",
    "...",
    "..a",
    "a..",
    ".hidden",
    "run.1/model.safetensors",
    "*",
    "[x]",
    "$HOME",
    "`id`",
    "a;b",
    "x" * 255,
    "a:b",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_are_refused(key: str, tmp_path: Path) -> None:
    """By every way in: check, place, store, source, listing."""
    root = StorageRoot("prod", RootSettings(url=str(tmp_path)))
    for ask in (check_key, root.check_key, root.place, root.source):
        with pytest.raises(UnprocessableError):
            ask(key)
    if key:  # the empty one is the root itself
        for look in (root.store, root.url_of, lambda key: list(root.walk(key))):
            with pytest.raises(UnprocessableError):
                look(key)


@pytest.mark.parametrize("key", GOOD_KEYS)
def test_keys_that_are_plain_names(key: str, tmp_path: Path) -> None:
    """They mean the very folder of that name, decoded nowhere on the way."""
    for url in (str(tmp_path), f"file://{quote(str(tmp_path))}"):
        root = StorageRoot("prod", RootSettings(url=url))
        assert check_key(key) == key
        assert root.url_of(key) == f"{os.path.realpath(tmp_path)}/{key}"
    remote = StorageRoot("s3", RootSettings(url="s3://bucket/prefix/"))
    assert remote.url_of(key) == f"s3://bucket/prefix/{key}"


@examples(200)
@given(
    st.lists(
        st.sampled_from(["..", ".", "/", "\\", "%2e", "%2f", "%25", "a", ":", "~", "\0", "%00", " ", "é"]),
        max_size=12,
    ).map("".join)
)
def test_whatever_is_accepted_stays_inside(key: str) -> None:
    """An accepted key is a path below the root, also for somebody who normalises or decodes it."""
    try:
        check_key(key)
    except UnprocessableError:
        return
    from urllib.parse import unquote

    text = key
    for _ in range(10):
        joined = os.path.normpath(f"/root/{text}")
        assert joined.startswith("/root/")
        assert joined == f"/root/{text}"
        text = unquote(text)


# -- local storage -------------------------------------------------------------------------------------------


class Place:
    """A root with a checkpoint in it, and beside it what nobody may touch."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "main"
        self.outside = folder / "outside"
        self.outside.mkdir(parents=True)
        dcp.save({"w": torch.arange(12.0)}, checkpoint_id=self.outside / "step-9")
        (self.outside / "secret.bin").write_bytes(SECRET)
        torch.save({"w": torch.ones(2)}, self.outside / "secret.pt")
        self.before = self._state()

    def _state(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.outside.rglob("*") if path.is_file()}

    def check(self) -> None:
        """What is outside is as it was."""
        assert self._state() == self.before


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Checked at the end."""
    found = Place(tmp_path)
    (tmp_path / "main").mkdir(exist_ok=True)
    yield found
    found.check()


def test_links_that_lead_out(place: Place) -> None:
    """Folders and files behind links out of the root are refused; those that stay inside are followed."""
    root = StorageRoot("main", RootSettings(url=str(place.root)))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=place.root / "run" / "step-1")
    links = {
        "absolute": place.outside / "step-9",
        "relative": Path("../outside/step-9"),
        "folder": place.outside,
        "file.pt": place.outside / "secret.pt",
        "chain": place.root / "absolute",
        "up": Path(".."),
    }
    for name, target in links.items():
        (place.root / name).symlink_to(target)
    for key in (
        "absolute",
        "relative",
        "folder/step-9",
        "file.pt",
        "chain",
        "up/outside/step-9",
        "folder/new",
    ):
        for ask in (root.source, root.store, root.place, root.url_of):
            with pytest.raises(UnprocessableError, match="leads out") as caught:
                ask(key)
            assert "outside" not in caught.value.detail.replace(key, "")
    (place.root / "run" / "latest").symlink_to("step-1")
    assert root.source("run/latest").index.shape(0) == (2,)
    assert {folder.key for folder in root.walk()} == {"", "run", "run/step-1"}
    assert not any("pt" in file for folder in root.walk() for file in folder.files)
    with pytest.raises(UnprocessableError):
        list(root.walk("folder"))


def test_a_root_behind_a_link_is_the_operators_choice(tmp_path: Path) -> None:
    """The root itself may be a link; what is below it is then measured by where it really is."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "real" / "step-1")
    (tmp_path / "link").symlink_to("real")
    root = StorageRoot("main", RootSettings(url=str(tmp_path / "link")))
    assert root.source("step-1").index.shape(0) == (2,)


def _links_to_files(folder: Path, place: Place) -> None:
    data = next(folder.glob("*.distcp"))
    data.unlink()
    data.symlink_to(place.outside / "secret.bin")


def _names_in_the_manifest(folder: Path, name: str) -> None:
    index = open_index(PosixStore(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointIndex, "check", lambda self: None)  # a hostile writer does not check
        data = encode_manifest(replace(index, files=[name, *index.files[1:]]))
    (folder / MANIFEST_NAME).write_bytes(data)


def _names_a_file_outside(folder: Path, place: Place) -> None:
    _names_in_the_manifest(folder, "../../outside/secret.bin")


def _names_an_absolute_file(folder: Path, place: Place) -> None:
    _names_in_the_manifest(folder, str(place.outside / "secret.bin"))


def _stock_metadata(folder: Path, place: Place) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    shutil.rmtree(folder)
    torch.distributed.checkpoint.save({"w": torch.arange(12.0)}, storage_writer=FileSystemWriter(folder))
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../../outside/secret.bin")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _weight_map(folder: Path, place: Place) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    document = {"metadata": {}, "weight_map": {"w": "../../outside/secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def _bin_weight_map(folder: Path, place: Place) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    document = {"metadata": {}, "weight_map": {"w": str(place.outside / "secret.pt")}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(document))


HOSTILE = [
    _links_to_files,
    _names_a_file_outside,
    _names_an_absolute_file,
    _stock_metadata,
    _weight_map,
    _bin_weight_map,
]


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__.strip("_"))
def test_names_inside_of_checkpoints(place: Place, make: object, tmp_path: Path) -> None:
    """What metadata names cannot be read through any route, and not be deleted."""
    folder = place.root / "run" / "step-1"
    dcp.save({"w": torch.arange(12.0)}, checkpoint_id=folder)
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as app:
        number = _register(app, "run/step-1")
        make(folder, place)  # type: ignore[operator]
        client = app.client("read", "write")
        for path in (
            "download",
            "download?format=torch",
            "files",
            "shards",
            "shards/ranks",
            "tensors",
            "tensors/data?name=w",
            "tensors/data?name=w&slice=0:2",
            f"diff?before={number}",
            "files/secret.bin",
            *(f"files/{quote(path.name)}" for path in folder.iterdir()),
        ):
            answer = client.get(f"/api/v1/checkpoints/{number}/{path}")
            assert answer.status_code < 500, (path, answer.text)
            assert SECRET not in answer.content, path
            if make not in (_names_an_absolute_file, _bin_weight_map):  # these say it themselves
                assert str(place.outside) not in answer.text, path
        client.post("/api/v1/checkpoints", json={"root": "main", "key": "run/step-1"})
        root = StorageRoot("main", RootSettings(url=str(place.root)))
        with suppress(CheckpointError, ProblemError):
            remove_checkpoint(root.store("run/step-1"), 0.0)


# -- over HTTP -----------------------------------------------------------------------------------------------


def _register(app: App, key: str) -> int:
    answer = app.client("write").post("/api/v1/checkpoints", json={"root": "main", "key": key})
    assert answer.status_code == 201, answer.text
    number: int = answer.json()["id"]
    return number


def test_registration_over_http(place: Place, tmp_path: Path) -> None:
    """No bad key, and no link out of the root, gets into the catalog."""
    (place.root / "link").symlink_to(place.outside / "step-9")
    (place.root / "up").symlink_to("..")
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as app:
        client = app.client("read", "write")
        keys = [key for key in BAD_KEYS if not any(0xD800 <= ord(char) < 0xE000 for char in key)]
        for key in [*keys, "link", "up/outside/step-9", "up/outside"]:
            answer = client.post("/api/v1/checkpoints", json={"root": "main", "key": key})
            assert answer.status_code in (404, 422), (key, answer.text)
        for url in (str(place.outside), f"file://{place.outside}", f"{place.root}/../outside", "s3://x/y"):
            answer = client.post("/api/v1/checkpoints", json={"root_url": url, "key": "step-9"})
            assert answer.status_code in (404, 422), url
            assert "outside" not in answer.text.replace(url, "")
        assert client.get("/api/v1/checkpoints").json()["items"] == []


def test_names_of_files_over_http(place: Place, tmp_path: Path) -> None:
    """A checkpoint's files are those in its folder, however the name is written."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=place.root / "run" / "step-1")
    (place.root / "run" / "beside.bin").write_bytes(SECRET)
    (place.root / "run" / "step-1" / "link.bin").symlink_to(place.outside / "secret.bin")
    (place.root / "run" / "step-1" / "folder").mkdir()
    (place.root / "run" / "step-1" / "folder" / "inner.bin").write_bytes(SECRET)
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as app:
        number = _register(app, "run/step-1")
        client = app.client("read")
        names = [
            "link.bin",
            "folder",
            "folder%2Finner.bin",
            "..%2Fbeside.bin",
            "%2e%2e%2fbeside.bin",
            "%252e%252e%252fbeside.bin",
            "..%5Cbeside.bin",
            "%2e%2e%2f",
            "%00",
            "a%00b",
            ".lock",
            ".tmp-x",
            quote(str(place.outside / "secret.bin"), safe=""),
            "..;/beside.bin",
            "%c0%ae%c0%ae%c0%afbeside.bin",
            "%ef%bc%8e%ef%bc%8e%2fbeside.bin",
        ]
        for name in names:
            answer = client.get(f"/api/v1/checkpoints/{number}/files/{name}")
            assert SECRET not in answer.content, name
            assert answer.status_code in (400, 404, 422), (name, answer.status_code)


def test_jobs_cannot_write_outside(place: Place, tmp_path: Path) -> None:
    """Targets of conversions are keys, too."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=place.root / "run" / "step-1")
    (place.root / "link").symlink_to(place.outside)
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as app:
        number = _register(app, "run/step-1")
        client = app.client("admin")
        keys = [key for key in BAD_KEYS if not any(0xD800 <= ord(char) < 0xE000 for char in key)]
        for key in keys:
            params = {"checkpoint_id": number, "to": "dcp", "target_key": key}
            answer = client.post("/api/v1/jobs", json={"kind": "convert", "params": params})
            assert answer.status_code == 422, (key, answer.text)


def test_s3_keys_stay_below_the_prefix(s3_server: S3Server, s3_root: str) -> None:
    """A root is a prefix: what begins alike beside it is no part of it."""
    options = s3_server.storage_options
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{s3_root}-beside/step-1", storage_options=options)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=f"{s3_root}/step-1", storage_options=options)
    root = StorageRoot("s3", RootSettings(url=s3_root, storage_options=options))
    assert {folder.key for folder in root.walk()} == {"step-1"}
    assert root.source("step-1").index.shape(0) == (3,)
    for key in ("../step-1", "x/../../step-1", "-beside/../step-1"):
        with pytest.raises(UnprocessableError):
            root.source(key)
    prefix = s3_root.rpartition("/")[2]
    with pytest.raises(ProblemError):
        root.source(f"{prefix}-beside/step-1")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_that_is_exchanged_meanwhile(tmp_path: Path, what: str) -> None:
    """However often and whenever it is pointed elsewhere, nothing outside is read."""
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
