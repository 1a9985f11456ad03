"""Parts of checkpoints on a real S3 server are dropped: by a manager, by hand, killed before any request."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

import dcp
from dcp.demo.s3_server import S3Server
from dcp.manager.cleanup.dropping import Drop, drop_parts
from dcp.storage.errors import CheckpointConflictError
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from dcp.storage.stores.objects.options import ObjectOptions
from tests.dcp.manager.manager_support import Recorder
from tests.support.crashes import Child, in_lab
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3
from tests.support.s3_versions import Place
from tests.support.with_optimizer import (
    OPTIMIZER_PART,
    full_state,
    parts_there,
    save_apart,
    seen_by_stock_at,
)

pytestmark = pytest.mark.timeout(900)

WITHOUT_REQUEST = ("make_root", "create", "write", "sync", "lock")


def kill(operation: Operation) -> None:
    """End this process as a power loss would."""
    os.kill(os.getpid(), signal.SIGKILL)


def stock_sees(place: Place) -> str:
    """By stock's own reader, which must not remember what was there before."""
    _, options = ObjectOptions.split(place.storage_options)
    return seen_by_stock_at(place.url, **{**options, "use_listings_cache": False})


def there(place: Place) -> str:
    """By dcp."""
    return parts_there(place.url, storage_options=place.storage_options)


def drop(place: Place, *faults: Fault, rewrite: bool = False) -> tuple[Drop, list[Operation]]:
    """The optimizer, and what was asked of the store."""
    store = FaultInjectingStore(place.store(), *faults)
    return drop_parts(store, [OPTIMIZER_PART], time.time(), rewrite=rewrite), store.log


def save(place: Place, *, apart: bool) -> None:
    """Version 1, of which the optimizer has a file of its own or not."""
    if apart:
        save_apart(place.url, open_store=lambda _: place.store())
        return
    dcp.save(full_state(1), checkpoint_id=place.url, storage_options=place.storage_options, no_dist=True)


def test_a_run_on_s3(s3_server: S3Server, s3_root: str) -> None:
    """The newest keeps its optimizer; of the others the weights are there, for stock as well, and no object
    of the optimizer."""
    told, keep = Recorder(), dcp.Retention(optimizer=dcp.Keep(last=1))
    options: dict[str, Any] = {"storage_options": s3_server.storage_options, "no_dist": True}
    with dcp.CheckpointManager(s3_root, keep=keep, on_event=told, **options) as manager:
        for step in (1, 2, 3):
            manager.save(step, full_state(step))
            assert manager.wait(120)
        state = full_state(0)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, state["step"]) == (3, 3)
    assert told.steps("dropped") == [1, 2]
    found = [
        parts_there(f"{s3_root}/step-{step:08d}", step, storage_options=s3_server.storage_options)
        for step in (1, 2, 3)
    ]
    assert found == ["weights", "weights", "whole"]
    first = Place(f"{s3_root}/step-00000001", s3_server.storage_options)
    assert stock_sees(first) == "weights"
    assert first.findings() == set()
    with raw_s3(s3_server) as raw:
        sizes = {name: size for name, size in raw.list(f"{first.url}/").items() if name.endswith(".distcp")}
    assert len(sizes) == 1
    assert sum(sizes.values()) < 2 * 3000 * 4 + 4000


def test_what_it_costs(s3_proxy: FaultProxy, s3_root: str) -> None:
    """No data is read or written: manifest and `.metadata`, with conditions, and one object is deleted."""
    place = Place(s3_root, s3_proxy.storage_options)
    save(place, apart=True)
    s3_proxy.log.clear()
    done, _ = drop(place)
    assert (done.outcome, len(done.files)) == ("dropped", 1)
    assert not [request for request in s3_proxy.requests("GetObject") if request.key.endswith(".distcp")]
    written = [request for request in s3_proxy.requests("PutObject") if "-probe-" not in request.key]
    assert len(written) == 2
    assert len(s3_proxy.log) <= 24


def test_a_save_that_came_first(s3_server: S3Server, s3_root: str) -> None:
    """By the condition of the request that publishes: what another save committed meanwhile stays whole."""
    place = Place(s3_root, s3_server.storage_options)
    save(place, apart=True)

    def overtake(_: Operation) -> None:
        save_apart(place.url, 2, open_store=lambda _: place.store())

    with pytest.raises(CheckpointConflictError):
        drop(place, Fault("publish", hook=overtake))
    assert parts_there(place.url, 2, storage_options=place.storage_options) == "whole"
    assert place.findings() == set()


@dataclass(frozen=True)
class Crash:
    """What one kill left, and what the next drop left."""

    killed: bool
    dcp: str
    stock: str
    findings: set[str]
    again: tuple[str, str, set[str], dict[str, int]]


def run_drop(place: Place, fault: Fault, rewrite: bool) -> None:
    """In the child."""
    drop(place, fault, rewrite=rewrite)


def every_crash(place: Place, rewrite: bool) -> list[Crash]:
    """Kill the drop before its first request, its second, and so on until it gets through."""
    before, count = place.at("before"), place.at("count")
    save(before, apart=not rewrite)
    before.copy_to(count)
    _, log = drop(count, rewrite=rewrite)
    numbers = [step.number for step in log if step.op not in WITHOUT_REQUEST]
    crashes = []
    for number in [*numbers, 1 << 30]:
        target = place.at(str(number))
        before.copy_to(target)
        ending = Child(run_drop, target, Fault(at=number, hook=kill), rewrite).wait()
        if ending.raised is not None:
            raise AssertionError(ending.raised.traceback_text)
        seen = there(target), stock_sees(target), target.findings()
        drop(target, rewrite=rewrite)
        after = there(target), stock_sees(target), target.findings(), target.listing()
        crashes.append(Crash(ending.killed, *seen, after))
    return crashes


@pytest.mark.exhaustive
@pytest.mark.parametrize("rewrite", [False, True])
def test_a_drop_killed_before_any_request(s3_server: S3Server, s3_root: str, rewrite: bool) -> None:
    """Whole until one request and without the optimizer after it, for dcp and for stock; the next drop ends
    the work."""
    crashes = in_lab(every_crash, Place(s3_root, s3_server.storage_options), rewrite, timeout_seconds=800)
    assert [crash.killed for crash in crashes] == [True] * (len(crashes) - 1) + [False]
    for seen in ([crash.dcp for crash in crashes], [crash.stock for crash in crashes]):
        turn = seen.index("weights")
        assert 0 < turn < len(seen) - 1
        assert seen == ["whole"] * turn + ["weights"] * (len(seen) - turn)
    for crash in crashes:
        assert crash.findings <= {"stray-file", "metadata"}, crash
        assert crash.again[:2] == ("weights", "weights"), crash
        # Copies that were never committed are left for dcp gc: they may be of one that is at work.
        assert crash.again[2] <= ({"stray-file"} if rewrite else set()), crash
        assert crash.again[3]["data"] == 1 or rewrite, crash
