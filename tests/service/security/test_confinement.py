"""Confinement to roots: no key, link or checkpoint makes the service touch or name an outside file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp
from tests.support.app import running_app
from tests.support.catalog import API, Catalog
from tests.support.examples import examples
from tests.support.hostile_files import rewrite_manifest
from tests.support.s3 import S3Server

SECRET = b"nobody-outside-may-see-this-0123456789"

_BAD = """
. .. / // /etc/passwd ../secret run/../../secret run/.. run/. run//step run/ ./run C: %2e%2e/secret
%2e%2e%2fsecret ..%2fsecret ..%5csecret %252e%252e%252fsecret %25252e%25252e/secret run%00
run%2f..%2f..%2fsecret %2Fetc%2Fpasswd run/%0a run/%3a%3a/x %ff/../.. simplecache::s3://bucket/x
x::y file:///etc/passwd s3://bucket/key s3:/bucket/key http://127.0.0.1/ run/https://elsewhere/x
memory://x ~ ~root/x run/.lock .lock %2525252525252525252e
..\\secret run\\..\\..\\secret C:\\secret \\\\host\\share
"""
_CONTROLLED = (
    "/\x00/step",
    "\x00",
    "\n",
    "\r\nX-Header: y",
    "\x7f",
    "\x85",
    "\u2028step",
    "\ud800",
    "/\udcff",
)
_LONG = ("x" * 1025, "a/" * 512 + "b", "x" * 256, "ü" * 200)
BAD_KEYS = ["", *_BAD.split(), *(f"run{end}" for end in _CONTROLLED), *_LONG]

_GOOD = """
run run/step-1 100% 50%25 a=b&c?d#e ... ..a a.. .hidden run.1/model.safetensors * [x] $HOME `id` a;b a:b
"""
GOOD_KEYS = [*_GOOD.split(), "a b/c", "ü/日本", "x" * 255]


class Outside:
    """Checkpoints and secrets in ``folder``, beside a root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        dcp.save({"w": torch.arange(12.0)}, checkpoint_id=folder / "step-9", no_dist=True)
        (folder / "secret.bin").write_bytes(SECRET)
        torch.save({"w": torch.ones(2)}, folder / "secret.pt")
        self.before = self.files()

    def files(self) -> dict[str, bytes]:
        """Return the content of all files."""
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Catalog]:
    """Start a catalog on SQLite, with the checkpoint run/step-1."""
    with running_app(
        f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, rate_limit="1000000/minute"
    ) as app:
        dcp.save({"w": torch.arange(12.0)}, checkpoint_id=tmp_path / "main/run/step-1", no_dist=True)
        yield Catalog(app, tmp_path)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    """Create outside files, and check at the end that they are unchanged."""
    found = Outside(tmp_path / "outside")
    yield found
    assert found.files() == found.before


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Start a catalog with an empty first root and a checkpoint in the other root."""
    folder = tmp_path_factory.mktemp("empty")
    with running_app(f"sqlite:///{folder / 'catalog.sqlite'}", folder, rate_limit="1000000/minute") as app:
        catalog = Catalog(app, folder)
        catalog.add("run/step-1", "other")
        yield catalog


def register(catalog: Catalog, key: str, **place: Any) -> int:
    """Register a checkpoint, and return the status."""
    body = json.dumps({"key": key, **(place or {"root": "main"})})
    return catalog.status("POST", "/checkpoints", content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("key", BAD_KEYS)
def test_unsafe_keys_are_refused(empty: Catalog, key: str) -> None:
    """Unsafe keys get 422 as a checkpoint, below a URL, as a folder to scan and as a target."""
    assert register(empty, key) == register(empty, key, root_url=str(empty.place(""))) == 422
    for kind, params in (
        ("scan", {"root": "main", "below": key}),
        ("convert", {"checkpoint_id": 1, "to": "dcp", "target_root": "main", "target_key": key}),
    ):
        if key or kind == "convert":  # an empty key scans the whole root
            body = json.dumps({"kind": kind, "params": params})
            headers = {"Content-Type": "application/json"}
            assert empty.status("POST", "/jobs", content=body, headers=headers) == 422, kind


def test_safe_keys_are_exact_names(local: Catalog) -> None:
    """A safe key means the folder of this exact name, and is decoded nowhere."""
    for number, key in enumerate(GOOD_KEYS):
        local.save(key, save_id=f"{number:08x}")
        assert register(local, key) == 201, key
        assert local.get("/checkpoints/lookup", root="main", key=key)["save_id"] == f"{number:08x}"


@examples(200)
@given(
    st.lists(
        st.sampled_from(["..", ".", "/", "\\", "%2e", "%2f", "%25", "a", ":", "~", "\0", "%00", " ", "é"]),
        max_size=12,
    ).map("".join)
)
def test_accepted_keys_stay_inside(empty: Catalog, key: str) -> None:
    """An accepted key stays below the root, also after normalizing and repeated URL decoding."""
    if register(empty, key) == 422:
        return
    for _ in range(10):
        joined = os.path.normpath(f"/root/{key}")
        assert joined == f"/root/{key}" and joined.startswith("/root/")
        key = unquote(key)


LINKS = {
    "absolute": "{outside}/step-9",
    "relative": "../outside/step-9",
    "folder": "{outside}",
    "file.pt": "{outside}/secret.pt",
    "chain": "absolute",
    "up": "..",
    "run/step-9": "{outside}/step-9",
}


@pytest.fixture
def linked(local: Catalog, outside: Outside) -> Catalog:
    """Add links out of the root, and one that stays inside."""
    for name, target in LINKS.items():
        local.place(name).symlink_to(target.format(outside=outside.folder))
    local.place("run/latest").symlink_to("step-1")
    return local


def test_links_out_of_the_root_are_refused(linked: Catalog) -> None:
    """Links out of the root are refused and not scanned; links inside are followed."""
    for key in (*LINKS, "folder/step-9", "up/outside/step-9", "folder/new"):
        answer = linked.http.post(f"{API}/checkpoints", json={"root": "main", "key": key})
        assert (answer.status_code, "leads out" in answer.json()["detail"]) == (422, True), key
        assert "outside" not in answer.json()["detail"].replace(key, "")
    main = linked.place("")
    for url in (f"{main}/../outside", str(linked.folder / "outside"), f"file://{linked.folder}/outside"):
        assert register(linked, "step-9", root_url=url) in (404, 422), url
    linked.scan()
    for below in ("folder", "up", "folder/step-9", "up/outside"):
        linked.do("scan", root="main", below=below)
    assert [*linked.states()] == ["run/step-1"]
    assert register(linked, "run/latest") == 201


@pytest.mark.parametrize(
    ("to", "key"),
    [
        *(("dcp", "folder/new"), ("dcp", "up/new")),
        *(("safetensors", "folder/new.safetensors"), ("torch", "up/outside/new.pt")),
    ],
)
def test_a_conversion_writes_nothing_outside(linked: Catalog, to: str, key: str) -> None:
    """A conversion to a target behind a link out of the root fails and writes nothing."""
    number = linked.register("run/step-1")
    job = linked.do("convert", checkpoint_id=number, to=to, target_key=key)
    assert job["state"] == "failed" and "outside" not in str(job["error"]).replace(key, "")
    assert not [*linked.folder.glob("**/new*")]


def test_a_checkpoint_that_became_a_link(linked: Catalog, outside: Outside) -> None:
    """A checkpoint replaced by a link is neither read nor deleted by any job."""
    number = linked.register("run/step-1")
    shutil.rmtree(linked.place("run/step-1"))
    linked.place("run/step-1").symlink_to(outside.folder / "step-9")
    one = {"checkpoint_id": number}
    for kind, params in (
        ("verify", one),
        ("stats", one),
        ("diff", {"a": number, "b": number}),
        ("convert", {**one, "to": "safetensors", "target_key": "copy.safetensors"}),
    ):
        job = linked.do(kind, **params)
        assert job["state"] == "failed" and str(outside.folder) not in str(job["error"]), kind
    assert not linked.place("copy.safetensors").exists()
    linked.do("delete", checkpoint_ids=[number], grace_seconds=0)
    linked.do("purge", checkpoint_id=number, now=True)


# -- names inside checkpoints --------------------------------------------------------------------------------


def _links_to_files(folder: Path, outside: Path) -> None:
    data = next(folder.glob("*.distcp"))
    data.unlink()
    data.symlink_to(outside / "secret.bin")


def _names_a_file_outside(folder: Path, outside: Path) -> None:
    rewrite_manifest(
        folder, lambda index: replace(index, files=["../../outside/secret.bin", *index.files[1:]])
    )


def _names_an_absolute_file(folder: Path, outside: Path) -> None:
    rewrite_manifest(
        folder, lambda index: replace(index, files=[str(outside / "secret.bin"), *index.files[1:]])
    )


def _stock_metadata(folder: Path, outside: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    shutil.rmtree(folder)
    torch.distributed.checkpoint.save({"w": torch.arange(12.0)}, storage_writer=FileSystemWriter(folder))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../../outside/secret.bin")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _index_of(folder: Path, name: str, file: str) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": {"w": file}}))


def _weight_map(folder: Path, outside: Path) -> None:
    _index_of(folder, "model.safetensors.index.json", "../../outside/secret.safetensors")


def _bin_weight_map(folder: Path, outside: Path) -> None:
    _index_of(folder, "pytorch_model.bin.index.json", str(outside / "secret.pt"))


HOSTILE = [
    *(_links_to_files, _names_a_file_outside, _names_an_absolute_file),
    *(_stock_metadata, _weight_map, _bin_weight_map),
]
ROUTES = (
    *("download", "download?format=torch", "files", "shards", "shards/ranks", "tensors"),
    *("tensors/data?name=w", "tensors/data?name=w&slice=0:2", "diff?before={number}", "files/secret.bin"),
)


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__.strip("_"))
def test_names_inside_of_checkpoints(
    local: Catalog, outside: Outside, make: Callable[[Path, Path], None]
) -> None:
    """Outside files named by metadata are not read through any route or job, and not deleted."""
    number, folder = local.register("run/step-1"), local.place("run/step-1")
    make(folder, outside.folder)
    files = (f"files/{quote(path.name)}" for path in folder.iterdir())
    for path in (*ROUTES, *files):
        answer = local.http.get(f"{API}/checkpoints/{number}/{path.format(number=number)}")
        assert answer.status_code < 500, (path, answer.text)
        assert SECRET not in answer.content, path
        if make not in (_names_an_absolute_file, _bin_weight_map):  # the checkpoint itself has the path
            assert str(outside.folder) not in answer.text, path
    register(local, "run/step-1")
    for kind, params in (
        ("verify", {"checkpoint_id": number}),
        ("delete", {"checkpoint_ids": [number], "grace_seconds": 0}),
        ("purge", {"checkpoint_id": number, "now": True}),
    ):
        local.http.post(f"{API}/jobs", json={"kind": kind, "params": params})
        local.work()
    assert SECRET.decode() not in local.http.get(f"{API}/jobs").text


NAMES = (
    *("link.bin", "folder", "folder%2Finner.bin", "..%2Fbeside.bin", "%2e%2e%2fbeside.bin"),
    *("%252e%252e%252fbeside.bin", "..%5Cbeside.bin", "%2e%2e%2f", "%00", "a%00b", ".lock", ".tmp-x"),
    *("..;/beside.bin", "%c0%ae%c0%ae%c0%afbeside.bin", "%ef%bc%8e%ef%bc%8e%2fbeside.bin"),
)


def test_names_of_files_over_http(local: Catalog, outside: Outside) -> None:
    """Only files directly in the checkpoint's folder are served, however the name is encoded."""
    folder, number = local.place("run/step-1"), local.register("run/step-1")
    (folder / "folder").mkdir()
    for path in (folder.parent / "beside.bin", folder / "folder" / "inner.bin"):
        path.write_bytes(SECRET)
    (folder / "link.bin").symlink_to(outside.folder / "secret.bin")
    for name in (*NAMES, quote(str(outside.folder / "secret.bin"), safe="")):
        answer = local.http.get(f"{API}/checkpoints/{number}/files/{name}")
        assert SECRET not in answer.content, name
        assert answer.status_code in (400, 404, 422), (name, answer.status_code)


def test_s3_keys_stay_below_the_prefix(tmp_path: Path, s3_server: S3Server, s3_root: str) -> None:
    """A root on S3 ends at its prefix: a bucket path that only begins alike is outside."""
    options = s3_server.storage_options
    for place, count in ((f"{s3_root}-beside", 2), (s3_root, 3)):
        dcp.save({"w": torch.ones(count)}, checkpoint_id=f"{place}/step-1", storage_options=options)
    roots = {"main": {"url": s3_root, "storage_options": options}}
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, roots=roots) as app:
        catalog = Catalog(app, tmp_path)
        catalog.scan()
        assert [*catalog.states()] == ["step-1"]
        assert catalog.get("/checkpoints/1/tensors")["items"][0]["shape"] == [3]
        for key in ("../step-1", "x/../../step-1", "-beside/../step-1"):
            assert register(catalog, key) == 422
        assert register(catalog, f"{s3_root.rpartition('/')[2]}-beside/step-1") == 404
        assert register(catalog, "step-1", root_url=f"{s3_root}-beside") in (404, 422)


@pytest.mark.parametrize("replaced", ["file", "folder"])
def test_links_switched_during_requests(local: Catalog, outside: Outside, replaced: str) -> None:
    """A link that is switched during requests never leads to an outside file."""
    number, folder = local.register("run/step-1"), local.place("run/step-1")
    (folder / "data.bin").write_bytes(b"inside")
    if replaced == "folder":
        shutil.copytree(folder, local.place("run/in"))
        shutil.rmtree(folder)
        link, targets = folder, [local.place("run/in"), outside.folder]
        (outside.folder / "data.bin").write_bytes(SECRET)
        outside.before = outside.files()
    else:
        (folder / "in.bin").write_bytes(b"inside")
        (folder / "data.bin").unlink()
        link, targets = folder / "data.bin", [folder / "in.bin", outside.folder / "secret.bin"]
    spare, done = local.folder / "spare", threading.Event()
    link.symlink_to(targets[0])

    def exchange() -> None:
        for turn in range(200_000):
            if done.is_set():
                return
            spare.symlink_to(targets[turn % 2])
            spare.replace(link)

    thread = threading.Thread(target=exchange)
    thread.start()
    seen: set[bytes] = set()
    try:
        for _ in range(150):
            answer = local.http.get(f"{API}/checkpoints/{number}/files/data.bin")
            seen |= {answer.content} if answer.status_code == 200 else set()
    finally:
        done.set()
        thread.join()
    assert seen == {b"inside"}
