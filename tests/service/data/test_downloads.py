"""Downloads over HTTP: a checkpoint as one file and its own files; ranges, damage, cancellation and S3."""

from __future__ import annotations

import io
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

import dcp
from tests.service.data.conftest import STATE, DataSite, data_site
from tests.support.conversion import many_kinds
from tests.support.processes import open_files
from tests.support.s3 import S3Server
from tests.support.service import wait_until


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize(
    "source",
    [
        "kinds",
        "sharded",
        *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ("training", "stock", "turned.pt")),
    ],
)
def test_downloads_equal_converted_files(source: str, to: str, site: DataSite, tmp_path: Path) -> None:
    """A download has the bytes and the size of the file that `dcp.convert` writes, also in ranges."""
    target = tmp_path / ("out.safetensors" if to == "safetensors" else "out.pt")
    dcp.convert(site.folder / "main" / source, target, to=to, executor="inline")
    url, whole = f"{site.known(source)}/download?format={to}", target.read_bytes()
    answer = site.http.get(url)
    assert answer.content == whole and "x-dcp-dropped" not in answer.headers
    assert int(site.http.head(url).headers["content-length"]) == len(whole)
    rng = np.random.default_rng(3)
    cuts = [sorted(rng.integers(0, len(whole), 2).tolist()) for _ in range(3)]
    for begin, end in ([0, 0], [len(whole) - 200, len(whole) - 1], *cuts):
        part = site.http.get(url, headers={"Range": f"bytes={begin}-{end}"})
        assert part.status_code == 206 and part.content == whole[begin : end + 1]


def test_downloads_resume_by_ranges_of_their_etag(site: DataSite) -> None:
    """A download has a file name, an ETag, and ranges that are valid for its content only."""
    url = f"{site.known()}/download"
    answer = site.http.get(url)
    assert answer.headers["content-disposition"].startswith('attachment; filename="step-3.safetensors"')
    tag = answer.headers["etag"]
    rest = site.http.get(url, headers={"Range": "bytes=1000-", "If-Range": tag})
    assert (rest.status_code, rest.content) == (206, answer.content[1000:])
    assert site.http.get(url, headers={"Range": "bytes=1000-", "If-Range": '"x"'}).status_code == 200
    assert site.http.get(url, headers={"If-None-Match": tag}).status_code == 304
    assert site.http.get(url, headers={"Range": "bytes=99999999-"}).status_code == 416
    assert site.http.get(url, params={"format": "torch"}).headers["etag"] != tag


def test_download_options(site: DataSite) -> None:
    """Names are selected and dtypes cast; options without a match or a meaning get 422."""
    url = f"{site.known('kinds')}/download"
    chosen = {"only": ["large", "scalar"], "dtype": "bfloat16"}
    answer = site.http.get(url, params=chosen)
    found = load_safetensors(answer.content)
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(
        ("large", "scalar"), torch.bfloat16
    )
    assert torch.equal(found["large"].nan_to_num(), many_kinds()["large"].bfloat16().nan_to_num())
    assert answer.headers["etag"] not in {
        site.http.head(url, params=p).headers["etag"] for p in ({}, {"format": "torch"})
    }
    for wrong in ({"only": "nothing.*"}, {"dtype": "int8"}, {"format": "pickle"}):
        refused = site.http.get(url, params=wrong)
        assert refused.status_code == 422 and refused.headers["content-type"] == "application/problem+json"


# -- damage --------------------------------------------------------------------------------------------------


def flip(folder: Path, at: float) -> None:
    """Flip one bit of the only data file; a second call restores it."""
    (data,) = folder.glob("*.distcp")
    with data.open("r+b") as file:
        file.seek(int(data.stat().st_size * at))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("to", ["safetensors", pytest.param("torch", marks=pytest.mark.exhaustive)])
def test_a_damaged_source_never_gives_all_bytes(own: DataSite, to: str) -> None:
    """A download of damaged data breaks off; ranges without damage are complete, others get 422."""
    folder = own.save("s", {"a": torch.arange(3_000_000.0), "b": torch.arange(9.0)})
    url = f"{own.known('s')}/download?format={to}"
    whole = own.http.get(url).content
    for at in (0.01, 0.6, 0.9):
        flip(folder, at)
        with pytest.raises(httpx.RemoteProtocolError):
            own.http.get(url)
        beside = len(whole) - 300 if at < 0.5 else 0
        part = own.http.get(url, headers={"Range": f"bytes={beside}-{beside + 299}"})
        assert part.content == whole[beside : beside + 300]
        near = int(len(whole) * at) + 2_000
        hit = own.http.get(url, headers={"Range": f"bytes={near}-{near + 9}"})
        assert hit.status_code == 422
        flip(folder, at)
    assert own.http.get(url).content == whole


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_range_of_a_zip_reads_nothing_before_it(own: DataSite, dtype: str | None) -> None:
    """A range of a zip file reads no earlier data, using stored checksums; a cast reads from the start."""
    folder = own.save("s", {"a": torch.arange(3_000_000.0), "b": torch.arange(9), "c": torch.ones(0)})
    params = {"format": "torch"} | ({"dtype": dtype} if dtype else {})
    url = f"{own.known('s')}/download"
    data = own.http.get(url, params=params).content
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    flip(folder, 0.3)
    end = own.http.get(url, params=params, headers={"Range": "bytes=-300"})
    assert end.status_code == (206 if dtype is None else 422)
    assert dtype is not None or end.content == data[-300:]


# -- permissions and quotas ----------------------------------------------------------------------------------


def test_hidden_and_deleted_checkpoints_are_refused(own: DataSite) -> None:
    """A key for another root gets 404, a request without a key 401, and a deleted checkpoint 410."""
    own.save("s")
    own.save("s", root="other")
    url, other = own.known("s"), own.known("s", root="other")
    number = url.rpartition("/")[2]
    paths = (
        "download files files/x tensors tensors/tree tensors/data?name=model.w shards shards/ranks shards/map"
    )
    paths += " shards/chunks phases tensors/grid?fqn=model.w tensors/statistics?fqn=model.w verifications"
    paths += f" statistics diff?before={number}"
    stranger, keyless = own.client("read", roots=["other"]), own.client()
    for path in paths.split():
        assert stranger.get(f"{url}/{path}").status_code == 404, path
        assert keyless.get(f"{url}/{path}").status_code == 401, path
    assert stranger.get(f"{other}/diff", params={"before": number}).status_code == 404
    own.http.delete(url).raise_for_status()
    assert own.http.get(f"{url}/download").status_code == 410


MANY = 16_000_000
"""Elements of four bytes: more than the 36 MiB that Linux may buffer for a client that does not read."""


def test_disconnected_clients_stop_the_reading(tmp_path: Path) -> None:
    """A disconnected client frees its slot, the only one, and the files are closed."""
    with ExitStack() as stack:
        site = data_site(stack, tmp_path, max_downloads=1)
        site.save("big", {"w": torch.from_numpy(np.zeros(MANY, np.int32))})
        ask = partial(site.http.stream, "GET", f"{site.known('big')}/download")
        with ask() as answer:
            body = answer.iter_raw(1000)  # httpx disconnects once the iterator is garbage
            next(body)
            wait_until(lambda: any("/big/" in path for path in open_files()), "its files are open")
        wait_until(lambda: not any("/big/" in path for path in open_files()), "its files are closed")

        def is_free() -> bool:
            with ask() as answer:
                return bool(answer.status_code == 200)

        wait_until(is_free, "its place is free")


@pytest.mark.parametrize(
    "path",
    [
        "download",
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ("files/FILE", "tensors/data?name=w")),
    ],
)
def test_downloads_end_with_a_revoked_key(path: str, tmp_path: Path) -> None:
    """A revoked key ends its running downloads; one key may use half of the slots."""
    with ExitStack() as stack:
        site = data_site(stack, tmp_path, max_downloads=2)
        (data,) = site.save("big", {"w": torch.from_numpy(np.zeros(MANY, np.int32))}).glob("*.distcp")
        url = f"{site.known('big')}/{path.replace('FILE', data.name)}"
        one, other, third = (site.client("read", name=name) for name in ("one", "other", "third"))
        ended = stack.enter_context(one.stream("GET", url))
        assert one.get(url).status_code == 429
        whole = stack.enter_context(other.stream("GET", url))
        assert third.get(url).status_code == 503
        bodies = [answer.iter_raw(1 << 16) for answer in (ended, whole)]
        received = [len(next(body)) for body in bodies]
        (number,) = [k["id"] for k in site.http.get("/api/v1/keys").json()["items"] if k["name"] == "one"]
        site.http.delete(f"/api/v1/keys/{number}").raise_for_status()
        time.sleep(2.2)  # running downloads are checked every two seconds
        with pytest.raises(httpx.RemoteProtocolError):
            received[0] += sum(map(len, bodies[0]))
        received[1] += sum(map(len, bodies[1]))
        assert received[1] == int(whole.headers["content-length"]) >= 4 * MANY


def test_quotas_limit_the_rate_of_downloads(tmp_path: Path) -> None:
    """The downloads of a root share its bytes per second, also after a change of the quota; with a limit on
    their number, small downloads count too."""
    rate = 4 << 20
    with ExitStack() as stack:
        quotas = {"root": {"download_bytes_per_second": rate}, "key": {"downloads": 2}}
        site = data_site(stack, tmp_path, features={"quotas": quotas})
        site.save("big", {"w": torch.from_numpy(np.zeros(MANY, np.int32))})
        url = f"{site.known('big')}/download"
        one = site.client("read", name="one")
        streams = [stack.enter_context(one.stream("GET", url)) for _ in range(2)]
        bodies = [answer.iter_raw(1 << 16) for answer in streams]
        assert one.get(url, headers={"Range": "bytes=0-99999"}).status_code == 429
        assert one.get(url, headers={"Range": "bytes=0-999"}).status_code == 206
        received, begun = 0, time.monotonic()
        while received < 4 * rate:
            received += sum(len(next(body)) for body in bodies)
        # the bytes of half a second, and those in socket buffers, are sent at once
        assert 1.5 < time.monotonic() - begun < 30
        body = {"kind": "root", "subject": "main", "limits": {"download_bytes_per_second": None}}
        assert site.http.post("/api/v1/quotas", json=body).status_code == 201
        with ThreadPoolExecutor(2) as pool:
            received += sum(pool.map(lambda body: sum(map(len, body)), bodies))
        assert received == 2 * int(streams[0].headers["content-length"])


# -- files ---------------------------------------------------------------------------------------------------


def test_files_are_sent_unchanged(own: DataSite) -> None:
    """The files of a checkpoint are sent unchanged; a single-file checkpoint has this file alone."""
    folder = own.save("s")
    url = f"{own.known('s')}/files"
    items = own.http.get(url).json()["items"]
    assert {item["role"] for item in items} == {"data", "commit"}
    for item in items:
        answer = own.http.get(f"{url}/{item['name']}")
        assert answer.content == (folder / item["name"]).read_bytes()
        assert len(answer.content) == item["bytes"]
    known = {"If-None-Match": answer.headers["etag"]}
    assert own.http.get(f"{url}/{item['name']}", headers=known).status_code == 304
    assert own.http.get(f"{url}/none").status_code == 404
    torch.save({"w": torch.ones(3)}, own.folder / "main/a.pt")
    (own.folder / "main/beside.txt").write_text("not a part of it")
    single = f"{own.known('a.pt')}/files"
    assert [item["name"] for item in own.http.get(single).json()["items"]] == ["a.pt"]
    assert own.http.get(f"{single}/a.pt").content == (own.folder / "main/a.pt").read_bytes()
    assert own.http.get(f"{single}/beside.txt").status_code == 404


def test_downloads_from_s3(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """Downloads from a bucket: a file is a redirect to a signed URL of the storage."""
    options = s3_server.storage_options
    dcp.save(STATE, checkpoint_id=f"{s3_root}/step-3", storage_options=options, no_dist=True)
    with ExitStack() as stack:
        site = data_site(stack, tmp_path, roots={"s3": {"url": s3_root, "storage_options": options}})
        number = site.known("step-3", "s3")
        url = f"{number}/files"
        (name,) = [i["name"] for i in site.http.get(url).json()["items"] if i["role"] == "data"]
        moved = site.http.get(f"{url}/{name}")
        assert (moved.status_code, moved.headers["cache-control"]) == (307, "no-store")
        assert options["secret"] not in moved.headers["location"]
        direct = httpx.get(moved.headers["location"], timeout=60).raise_for_status()
        passed = site.http.get(f"{url}/{name}?redirect=false", headers={"Range": "bytes=5-99"})
        assert (passed.status_code, passed.content) == (206, direct.content[5:100])
        whole = site.http.get(f"{number}/download")
        assert torch.equal(load_safetensors(whole.content)["model.w"], STATE["model"]["w"])
        part = site.http.get(f"{number}/download", headers={"Range": "bytes=100-50000"})
        assert part.content == whole.content[100:50_001]
