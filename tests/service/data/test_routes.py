"""Data over HTTP. Internal: states of rows that no request can bring about quickly.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load as load_safetensors

import dcp
from dcp.server.catalog.checkpoints import set_state
from dcp.server.data.sending import responses
from dcp.server.scanning.registering import Registration, register
from dcp.server.security.keys import list_keys, revoke_key
from tests.support.app import App, running_app
from tests.support.asgi_server import served
from tests.support.databases import MakeDatabase
from tests.support.s3 import S3Server
from tests.support.sharded import grid, save_sharded

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(60_000.0).reshape(200, 300), "b": torch.ones(7, dtype=torch.bfloat16)},
    "step": 3,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`STATE`, saved once."""
    path = tmp_path_factory.mktemp("saved") / "step-3"
    dcp.save(STATE, checkpoint_id=path)
    return path


def _fill(folder: Path, saved: Path) -> None:
    for root in ("main", "other"):
        shutil.copytree(saved, folder / root / "run" / "step-3")


@pytest.fixture
def app(saved: Path, tmp_path: Path) -> Iterator[App]:
    """The application with a checkpoint in each of its two roots; what is asked for here are no queries."""
    _fill(tmp_path, saved)
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as running:
        yield running


@pytest.fixture
def any_app(make_database: MakeDatabase, saved: Path, tmp_path: Path) -> Iterator[App]:
    """The same, on both databases."""
    _fill(tmp_path, saved)
    with running_app(make_database(), tmp_path) as running:
        yield running


def known(app: App, key: str = "run/step-3", root: str = "main") -> int:
    """The id of the checkpoint, which is registered."""
    found = register(
        app.service.database, app.service.roots, Registration(root=root, key=key), actor="test", visible=None
    )
    assert found.id is not None
    return found.id


@pytest.fixture
def client(app: App) -> TestClient:
    """With a key that may read."""
    return app.client("read")


def test_downloads(app: App, client: TestClient, tmp_path: Path) -> None:
    """Both formats are loaded by their own libraries; a download that broke off goes on."""
    url = f"/api/v1/checkpoints/{known(app)}/download"
    answer = client.get(url)
    assert answer.status_code == 200
    assert answer.headers["content-disposition"].startswith('attachment; filename="step-3.safetensors"')
    assert len(answer.content) == int(answer.headers["content-length"])
    assert torch.equal(load_safetensors(answer.content)["model.w"], STATE["model"]["w"])
    tag = answer.headers["etag"]
    rest = client.get(url, headers={"Range": "bytes=1000-", "If-Range": tag})
    assert rest.status_code == 206
    assert rest.content == answer.content[1000:]
    assert client.get(url, headers={"If-None-Match": tag}).status_code == 304
    assert client.head(url).headers["content-length"] == answer.headers["content-length"]
    whole = client.get(url, params={"format": "torch"})
    loaded = torch.load(io.BytesIO(whole.content), weights_only=True)
    assert loaded["step"] == 3
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    part = client.get(url, params={"only": "model.b", "dtype": "float32"})
    assert {name: value.dtype for name, value in load_safetensors(part.content).items()} == {
        "model.b": torch.float32
    }
    assert client.get(url, params={"only": "nothing"}).status_code == 422
    assert client.get(url, params={"dtype": "int8"}).status_code == 422
    assert client.get(url, params={"format": "pickle"}).status_code == 422


def test_tensor_data(app: App, client: TestClient) -> None:
    """Whole tensors and slices; what does not exist or does not fit is said so."""
    url = f"/api/v1/checkpoints/{known(app)}/tensors/data"
    whole = client.get(url, params={"name": "model.w"})
    assert np.array_equal(np.load(io.BytesIO(whole.content)), STATE["model"]["w"].numpy())
    assert whole.headers["x-dcp-shape"] == "200,300"
    taken = client.get(url, params={"name": "model.w", "slice": "-1,::50"})
    assert np.load(io.BytesIO(taken.content)).tolist() == STATE["model"]["w"][-1, ::50].tolist()
    assert taken.headers["etag"] != whole.headers["etag"]
    small = client.get(url, params={"name": "model.b"})
    assert small.headers["x-dcp-dtype"] == "bfloat16"
    assert np.load(io.BytesIO(small.content)).dtype == np.float32
    stored = client.get(url, params={"name": "model.b", "format": "safetensors"})
    assert load_safetensors(stored.content)["model.b"].dtype == torch.bfloat16
    part = client.get(url, params={"name": "model.w"}, headers={"Range": "bytes=-16"})
    assert part.content == whole.content[-16:]
    assert client.get(url, params={"name": "model.w"}, headers={"Range": "bytes=900000-"}).status_code == 416
    for params, status in [
        ({"name": "none"}, 404),
        ({"name": "step"}, 404),
        ({"name": "model.w", "slice": "1,2,3"}, 422),
        ({"name": "model.w", "slice": "x"}, 422),
        ({}, 422),
    ]:
        answer = client.get(url, params=params)
        assert answer.status_code == status, params
        assert answer.headers["content-type"] == "application/problem+json"


def test_tensors_and_tree(any_app: App) -> None:
    """From the catalog, without the storage: also when that is gone."""
    number, client = known(any_app), any_app.client("read")
    shutil.rmtree(any_app.service.roots.get("main").url)
    page = client.get(f"/api/v1/checkpoints/{number}/tensors", params={"limit": 2}).json()
    assert [item["fqn"] for item in page["items"]] == ["model.b", "model.w"]
    assert page["items"][1]["shape"] == [200, 300]
    rest = client.get(f"/api/v1/checkpoints/{number}/tensors", params={"cursor": page["next_cursor"]}).json()
    assert [(item["fqn"], item["kind"]) for item in rest["items"]] == [("step", "object")]
    found = client.get(
        f"/api/v1/checkpoints/{number}/tensors", params={"glob": "*.w", "kind": "tensor"}
    ).json()
    assert [item["dtype"] for item in found["items"]] == ["float32"]
    tree = client.get(f"/api/v1/checkpoints/{number}/tensors/tree").json()
    assert [(node["name"], node["tensors"], node["objects"]) for node in tree["items"]] == [
        ("model", 2, 0),
        ("step", 0, 1),
    ]
    below = client.get(f"/api/v1/checkpoints/{number}/tensors/tree", params={"prefix": "model"}).json()
    assert below["items"][0]["entry"]["dtype"] == "bfloat16"


def test_shards(app: App, client: TestClient, tmp_path: Path) -> None:
    """Which rank has which box, page by page, and how much each rank has."""
    tensors = {"a": torch.arange(64.0).reshape(8, 8), "b": torch.ones(5)}
    save_sharded(tmp_path / "main" / "sharded", tensors, {"a": grid((8, 8), (2, 2))})
    url = f"/api/v1/checkpoints/{known(app, 'sharded')}/shards"
    page = client.get(url, params={"limit": 1}).json()
    (tensor,) = page["items"]
    assert tensor["chunk_count"] == 4
    assert [(chunk["rank"], chunk["offsets"]) for chunk in tensor["chunks"]] == [
        (0, [0, 0]),
        (1, [0, 4]),
        (2, [4, 0]),
        (3, [4, 4]),
    ]
    rest = client.get(url, params={"cursor": page["next_cursor"]}).json()
    assert [item["fqn"] for item in rest["items"]] == ["b"]
    assert rest["next_cursor"] is None
    ranks = client.get(f"{url}/ranks").json()["items"]
    assert [(share["rank"], share["tensors"], share["tensor_bytes"]) for share in ranks] == [
        (0, 2, 84),
        (1, 1, 64),
        (2, 1, 64),
        (3, 1, 64),
    ]
    assert client.get(url, params={"cursor": "nonsense"}).status_code == 422
    assert client.get(url, params={"glob": "b"}).json()["items"][0]["fqn"] == "b"


def test_differences(app: App, client: TestClient, tmp_path: Path) -> None:
    """By checksums where both have them, else by structure."""
    changed = {"model": {"w": STATE["model"]["w"] + 1, "new": torch.ones(1)}, "step": 4}
    dcp.save(changed, checkpoint_id=tmp_path / "main" / "run" / "step-4")
    first, second = known(app), known(app, "run/step-4")
    url = f"/api/v1/checkpoints/{second}/diff"
    found = client.get(url, params={"before": first}).json()
    assert found["basis"] == "checksums"
    assert {item["fqn"]: item["kind"] for item in found["tensors"]} == {
        "model.w": "changed",
        "model.b": "removed",
        "model.new": "added",
    }
    assert [(item["fqn"], item["kind"]) for item in found["objects"]] == [("step", "changed")]
    assert found["counts"]["changed"] == 1
    page = client.get(url, params={"before": first, "limit": 2}).json()
    rest = client.get(url, params={"before": first, "limit": 2, "cursor": page["next_cursor"]}).json()
    assert [*page["tensors"], *rest["tensors"]] == found["tensors"]
    plain = client.get(url, params={"before": first, "basis": "structure"}).json()
    assert plain["counts"]["changed"] == 0
    assert plain["equal_tensors"] == 1
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "main" / "stock")
    stock = client.get(f"/api/v1/checkpoints/{known(app, 'stock')}/diff", params={"before": first}).json()
    assert stock["basis"] == "structure"
    assert client.get(url, params={"before": 999_999}).status_code == 404


def test_files(app: App, client: TestClient, tmp_path: Path) -> None:
    """A checkpoint's own files, of a single file that one alone."""
    number = known(app)
    url = f"/api/v1/checkpoints/{number}/files"
    items = client.get(url).json()["items"]
    assert {item["role"] for item in items} == {"data", "commit"}
    for item in items:
        answer = client.get(f"{url}/{item['name']}")
        assert answer.content == (tmp_path / "main" / "run" / "step-3" / item["name"]).read_bytes()
        assert len(answer.content) == item["bytes"]
    tag = answer.headers["etag"]
    assert client.get(f"{url}/{item['name']}", headers={"If-None-Match": tag}).status_code == 304
    assert client.get(f"{url}/none").status_code == 404
    torch.save({"w": torch.ones(3)}, tmp_path / "main" / "a.pt")
    (tmp_path / "main" / "beside.txt").write_text("not a part of it")
    single = f"/api/v1/checkpoints/{known(app, 'a.pt')}/files"
    assert [item["name"] for item in client.get(single).json()["items"]] == ["a.pt"]
    assert client.get(f"{single}/a.pt").content == (tmp_path / "main" / "a.pt").read_bytes()
    assert client.get(f"{single}/beside.txt").status_code == 404


def test_who_may_and_in_which_state(app: App, client: TestClient) -> None:
    """A key for another root sees nothing; deleted checkpoints give nothing; vanished ones are gone."""
    number, other = known(app), known(app, root="other")
    paths = [
        "download",
        "files",
        "files/x",
        "tensors",
        "tensors/tree",
        "tensors/data?name=model.w",
        "shards",
        "shards/ranks",
        f"diff?before={number}",
    ]
    stranger = app.client("read", roots=["other"])
    for path in paths:
        assert stranger.get(f"/api/v1/checkpoints/{number}/{path}").status_code == 404, path
        assert app.client().get(f"/api/v1/checkpoints/{number}/{path}").status_code == 401, path
    assert stranger.get(f"/api/v1/checkpoints/{other}/diff", params={"before": number}).status_code == 404
    with app.service.database.write() as connection:
        set_state(connection, number, "deleted", actor="test")
    assert client.get(f"/api/v1/checkpoints/{number}/download").status_code == 410


def test_storage_that_has_lost_it(app: App, client: TestClient, tmp_path: Path) -> None:
    """Gone if the files are not there; unprocessable if they are damaged, without a path of the machine."""
    number = known(app)
    folder = tmp_path / "main" / "run" / "step-3"
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1000])
    answer = client.get(f"/api/v1/checkpoints/{number}/download")
    assert answer.status_code == 422
    assert str(tmp_path) not in answer.text
    for file in folder.iterdir():
        file.unlink()
    assert client.get(f"/api/v1/checkpoints/{number}/download").status_code == 410
    assert client.get(f"/api/v1/checkpoints/{number}/tensors").status_code == 200


_MANY: Final = 5_000_000.0
"""Elements of four bytes: twice what the system takes for a client that reads nothing."""


def test_over_a_real_socket(tmp_path: Path) -> None:
    """Through all middleware: a damaged source is a broken connection, and who leaves stops the reading."""
    folder = tmp_path / "main" / "big"
    dcp.save({"w": torch.arange(_MANY)}, checkpoint_id=folder)
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, auth="off") as app:
        url = f"/api/v1/checkpoints/{known(app, 'big')}/download"
        with served(app.app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            whole = client.get(url)
            assert len(whole.content) == int(whole.headers["content-length"])
            with client.stream("GET", url) as answer:
                next(answer.iter_raw(1000))
            deadline = time.monotonic() + 60
            while app.app.state.data.streams.running and time.monotonic() < deadline:
                time.sleep(0.01)
            assert app.app.state.data.streams.running == 0
            (data,) = folder.glob("*.distcp")
            with data.open("r+b") as file:
                file.seek(12_000_000)
                file.write(b"damage")
            with pytest.raises(httpx.RemoteProtocolError):
                client.get(url)
            part = client.get(url, headers={"Range": "bytes=0-999999"})
            assert part.content == whole.content[:1_000_000]


_OTHERS = [pytest.param(what, marks=pytest.mark.exhaustive) for what in ("files/FILE", "tensors/data?fqn=w")]


@pytest.mark.parametrize("what", ["download", *_OTHERS])
def test_downloads_end_with_their_key(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revoked while a body is sent, a key gets no more than what is under way already; others get it all.

    One key has half of the places; where all are taken others are refused as well, by another status."""
    monkeypatch.setattr(responses, "KEY_SECONDS", 0.1)
    folder = tmp_path / "main" / "big"
    dcp.save({"w": torch.arange(_MANY)}, checkpoint_id=folder)
    (data,) = folder.glob("*.distcp")
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, max_downloads=2) as app:
        url = f"/api/v1/checkpoints/{known(app, 'big')}/{what.replace('FILE', data.name)}"
        with served(app.app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            one, other, third = (
                {"Authorization": f"Bearer {app.key('read', name=name)}"}
                for name in ("one", "other", "third")
            )
            with client.stream("GET", url, headers=one) as ended, contextlib.ExitStack() as stack:
                assert client.get(url, headers=one).status_code == 429
                whole = stack.enter_context(client.stream("GET", url, headers=other))
                assert client.get(url, headers=third).status_code == 503
                bodies = [answer.iter_raw(1 << 16) for answer in (ended, whole)]
                received = [len(next(body)) for body in bodies]
                with app.service.database.read() as connection:
                    (number,) = [key.id for key in list_keys(connection) if key.name == "one"]
                app.service.database.transact(lambda connection: revoke_key(connection, number, time.time()))
                time.sleep(0.3)
                with pytest.raises(httpx.RemoteProtocolError):
                    received[0] += sum(map(len, bodies[0]))
                received[1] += sum(map(len, bodies[1]))
        assert received[1] == int(whole.headers["content-length"]) >= 4 * _MANY


def test_files_on_s3(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """The storage gives files itself, to whoever has the signed address; or the service passes them on."""
    dcp.save(STATE, checkpoint_id=f"{s3_root}/step-3", storage_options=s3_server.storage_options)
    roots = {"s3": {"url": s3_root, "storage_options": s3_server.storage_options}}
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, roots=roots) as app:
        client = app.client("read")
        number = known(app, "step-3", "s3")
        url = f"/api/v1/checkpoints/{number}/files"
        (name,) = [item["name"] for item in client.get(url).json()["items"] if item["role"] == "data"]
        moved = client.get(f"{url}/{name}", follow_redirects=False)
        assert moved.status_code == 307
        assert moved.headers["cache-control"] == "no-store"
        direct = httpx.get(moved.headers["location"], timeout=60)
        assert direct.status_code == 200
        passed = client.get(f"{url}/{name}", params={"redirect": "false"}, headers={"Range": "bytes=5-99"})
        assert passed.status_code == 206
        assert passed.content == direct.content[5:100]
        secret = s3_server.storage_options["secret"]
        assert secret not in moved.headers["location"]
        loaded = load_safetensors(client.get(f"/api/v1/checkpoints/{number}/download").content)
        assert torch.equal(loaded["model.w"], STATE["model"]["w"])
