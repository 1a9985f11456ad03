"""Plans of downloads. Internal: plans are counted, and given up in between.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

import dcp
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.server.data import downloads
from dcp.server.data.downloads import DownloadOptions, PlannedDownload, Plans, plan_download
from dcp.server.data.opening import OpenCheckpoint, OpenCheckpoints
from dcp.server.data.sharing import AbandonedError, SharedValues, Wanted
from dcp.server.roots import StorageRoot
from dcp.server.settings import RootSettings
from tests.service.data.test_routes import known
from tests.support.app import App, running_app
from tests.support.asgi_server import served

MANY = 20_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of many small tensors."""
    path = tmp_path_factory.mktemp("many") / "main" / "run" / "many"
    state = {f"layers.{n // 10}.part{n % 10}.weight": torch.full((64,), float(n)) for n in range(MANY)}
    dcp.save({"model": state, "step": 3}, checkpoint_id=path)
    return path


def open_it(path: Path, checkpoints: OpenCheckpoints | None = None) -> OpenCheckpoint:
    """The checkpoint ``path``, whose parent is taken for a root."""
    root = StorageRoot("prod", RootSettings(url=str(path.parent)))
    return (checkpoints or OpenCheckpoints()).open(root, path.name)


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_planning_costs_some_passes_over_the_names(many: Path, to: str) -> None:
    """A plan, and the first bytes of a range near the end, take as long as some documents of all names."""
    document = {f"layers.{n}": {"shape": [n], "offsets": [n, n + 1], "name": str(n)} for n in range(MANY)}
    references, plans = [], []
    for _ in range(3):
        with garbage_collection_paused():  # of other tests' objects, too
            begun = time.process_time()
            json.loads(json.dumps(document))
            references.append(time.process_time() - begun)
            opened = open_it(many)
            begun = time.process_time()
            body = plan_download(opened, DownloadOptions(to)).body
            with closing(body.parts(0, body.size_bytes)) as parts:
                next(parts)
            plans.append(time.process_time() - begun)
    assert min(plans) < 6 * min(references)


def planned(source: OpenCheckpoint) -> PlannedDownload:
    """A plan for tests of who gets it."""
    return plan_download(source, DownloadOptions("safetensors", only=("model.layers.1.*",)))


def test_a_plan_is_made_once_and_shared(many: Path) -> None:
    """Those who ask while it is made wait for it, those who ask later have it at once."""
    plans, opened, made = Plans(), open_it(many), []

    def make(check: Wanted) -> PlannedDownload:
        time.sleep(0.1)
        made.append(1)
        return planned(opened)

    async def ask() -> None:
        found = await asyncio.gather(*(plans.get("a", make) for _ in range(5)))
        found.append(await plans.get("a", make))
        assert len({id(one) for one in found}) == 1
        assert await plans.get("b", make) is not found[0]

    asyncio.run(ask())
    assert len(made) == 2


def test_what_nobody_waits_for_is_given_up(many: Path) -> None:
    """Cancelled by its last client, planning stops at its next step; who comes then begins anew."""
    plans, opened = Plans(), open_it(many)
    going, stopped = threading.Event(), threading.Event()

    def endless(check: Wanted) -> PlannedDownload:
        going.set()
        try:
            while True:
                check()
                time.sleep(0.01)
        except AbandonedError:
            stopped.set()
            raise

    async def ask() -> None:
        first, second = (asyncio.ensure_future(plans.get("a", endless)) for _ in range(2))
        await asyncio.to_thread(going.wait, 30)
        first.cancel()
        await asyncio.sleep(0.1)
        assert not stopped.is_set()
        second.cancel()
        assert await asyncio.to_thread(stopped.wait, 30)
        assert (await plans.get("a", lambda check: planned(opened))).source is opened

    asyncio.run(ask())


def test_a_checkpoint_is_opened_once_for_all_who_ask(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index is read once for requests at the same time, and shared as long as one of them has it."""
    from dcp.storage.formats.opening import sources

    read: list[str] = []
    real = sources.index_at

    def slow(place: sources.SourcePlace) -> object:
        read.append(place.url)
        time.sleep(0.2)
        return real(place)

    monkeypatch.setattr(sources, "index_at", slow)
    checkpoints = OpenCheckpoints(kept_bytes=0)
    found: list[OpenCheckpoint] = []
    threads = [threading.Thread(target=lambda: found.append(open_it(many, checkpoints))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(open_it(many, checkpoints))
    assert len({id(one) for one in found}) == 1
    assert len(read) == 1


@pytest.fixture
def app(many: Path, tmp_path: Path) -> Iterator[App]:
    """A service with one place for a download."""
    folder = many.parents[2]
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", folder, max_downloads=1) as running:
        yield running


def test_a_place_comes_before_planning(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places taken nothing is planned; who asks for a plan that is being made waits for it."""
    planning, begun, go_on = [], threading.Event(), threading.Event()
    real = downloads.plan_download

    def slow(*arguments: object) -> object:
        planning.append(arguments[1])
        begun.set()
        go_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("dcp.server.routes.data.downloads.plan_download", slow)
    url = f"/api/v1/checkpoints/{known(app, 'run/many')}/download"
    headers = {"Authorization": f"Bearer {app.key('read')}"}
    answers: list[httpx.Response] = []
    with (
        served(app.app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client,
    ):
        small = {"Range": "bytes=0-99"}  # so that sending needs no place
        asking = [
            threading.Thread(target=lambda: answers.append(client.get(url, headers=small))) for _ in range(2)
        ]
        asking[0].start()
        assert begun.wait(30)
        asking[1].start()
        other = client.get(url, params={"format": "torch"}, headers=small)
        assert other.status_code == 503
        assert "retry-after" in other.headers
        go_on.set()
        for thread in asking:
            thread.join(60)
    assert [answer.status_code for answer in answers] == [206, 206]
    assert answers[0].content == answers[1].content
    assert len(planning) == 1


def test_a_client_that_leaves_ends_the_planning(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free again at once, and planning stops between two steps."""
    begun, stopped = threading.Event(), threading.Event()

    def endless(_opened: object, _options: object, check: Wanted) -> object:
        begun.set()
        try:
            for _ in range(3000):
                check()
                time.sleep(0.01)
        except AbandonedError:
            stopped.set()
            raise
        raise AssertionError("nobody told it to stop")

    monkeypatch.setattr("dcp.server.routes.data.downloads.plan_download", endless)
    head = f"GET /api/v1/checkpoints/{known(app, 'run/many')}/download HTTP/1.1\r\nHost: localhost\r\n"
    with served(app.app) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"{head}Authorization: Bearer {app.key('read')}\r\n\r\n".encode())
            assert begun.wait(60)
        assert stopped.wait(60)
        deadline = time.monotonic() + 60
        while app.app.state.data.streams.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert app.app.state.data.streams.running == 0


@dataclass(eq=False)
class Value:
    held_bytes: int


def test_the_last_ones_are_kept() -> None:
    """Up to so many, and so many bytes; which is used again is not the next to go."""
    values = SharedValues[str, Value](count=3, kept_bytes=100)
    for name in "abc":
        values.get(name, lambda: Value(10))
    values.get("a", lambda: pytest.fail("it is there"))
    values.get("d", lambda: Value(10))
    gc.collect()
    assert [name in values for name in "abcd"] == [True, False, True, True]
    values.get("e", lambda: Value(85))
    gc.collect()
    assert [name in values for name in "abcde"] == [False, False, False, True, True]


def test_what_is_too_large_is_shared_while_somebody_has_it() -> None:
    """It is not kept for itself, and pushes nothing out."""
    values = SharedValues[str, Value](count=3, kept_bytes=100)
    values.get("a", lambda: Value(10))
    large = values.get("large", lambda: Value(101))
    assert values.get("large", lambda: Value(101)) is large
    del large
    gc.collect()
    assert [name in values for name in ("a", "large")] == [True, False]


def test_a_failure_is_of_all_who_wait_and_of_nobody_later() -> None:
    """Who asks afterwards has it made anew."""
    values = SharedValues[str, Value](count=3, kept_bytes=100)
    go_on = threading.Event()

    def fail() -> Value:
        go_on.wait(30)
        raise OSError("not now")

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(values.get, "a", fail) for _ in range(3)]
        while values.waiting < 3:
            pass
        go_on.set()
        assert {str(one.exception()) for one in asked} == {"not now"}
    assert values.waiting == 0
    assert values.get("a", lambda: Value(1)).held_bytes == 1
