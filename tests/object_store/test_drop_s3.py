"""Pruned checkpoints on a real S3 server: by a manager, by the command, and after a kill at any request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import dcp
from tests.support.fault_doors import HARMLESS, given, run
from tests.support.fault_plan import HANG
from tests.support.fault_proxy import FaultProxy
from tests.support.programs import Program
from tests.support.s3 import S3Server
from tests.support.s3_versions import Place
from tests.support.with_optimizer import full_state, present_parts, save_apart, seen_by_stock_at

pytestmark = pytest.mark.timeout(900)


def seen(place: Place) -> tuple[str, str]:
    """Return the parts that dcp sees, and those that stock's own reader sees without a listings cache."""
    options = {key: value for key, value in place.storage_options.items() if key != "part_bytes"}
    by_stock = seen_by_stock_at(place.url, **options, use_listings_cache=False)
    return present_parts(place.url, storage_options=place.storage_options), by_stock


def prune(place: Place, *options: str) -> str:
    """Drop the optimizer with the command, and return the output."""
    done = run("prune", place.url, "--yes", *options, *given(place.storage_options))
    assert done.status == 0, done.err
    return done.out


def _save(place: Place, *, apart: bool) -> None:
    if apart:
        save_apart(place.url, open_store=lambda _: place.store())
    else:
        options = place.storage_options
        dcp.save(full_state(1), checkpoint_id=place.url, storage_options=options, no_dist=True)


def test_older_steps_on_s3_lose_their_optimizer(s3_server: S3Server, s3_root: str) -> None:
    """The newest step keeps the optimizer; other steps keep no object of it and load in stock."""
    events: list[Any] = []
    keep, options = dcp.Retention(optimizer=dcp.Keep(last=1)), s3_server.storage_options
    with dcp.CheckpointManager(
        s3_root, keep=keep, on_event=events.append, storage_options=options, no_dist=True
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, full_state(step))
            assert manager.wait(120)
        state = full_state(0)
        restored = manager.restore(state)
        assert restored is not None and (restored.step, state["step"]) == (3, 3)
    assert [event.step for event in events if event.kind == "dropped"] == [1, 2]
    urls = [f"{s3_root}/step-{step:08d}" for step in (1, 2, 3)]
    found = [present_parts(url, step, storage_options=options) for step, url in enumerate(urls, start=1)]
    assert found == ["weights", "weights", "whole"]
    first = Place(urls[0], options)
    assert seen(first) == ("weights", "weights") and first.findings() == set()
    sizes = [size for name, size in first.raw.list(f"{first.url}/").items() if name.endswith(".distcp")]
    assert len(sizes) == 1 and sum(sizes) < 2 * 3000 * 4 + 4000


@pytest.mark.exhaustive
@pytest.mark.parametrize("rewrite", [False, True])
def test_a_drop_killed_at_any_request(s3_proxy: FaultProxy, s3_root: str, rewrite: bool) -> None:
    """Readers see all parts up to one request, then the weights; the next prune completes the work."""
    place = Place(s3_root, s3_proxy.server.storage_options)
    options = ("--rewrite",) if rewrite else ()
    _save(place.at("before"), apart=not rewrite)
    rows = []
    for number in itertools.count(1):
        target = place.at(str(number))
        place.at("before").copy_to(target)
        rule = s3_proxy.spoil(HANG, nth=number)
        arguments = ("prune", target.url, "--yes", *options, *given(s3_proxy.storage_options))
        child = Program("-m", "dcp", *arguments)
        try:
            while rule.seen < number and child.poll() is None:
                s3_proxy.wait_for_request(0.5)
        finally:
            child.kill()
            child.wait()
        s3_proxy.heal()
        rows.append((*seen(target), target.findings() <= HARMLESS))
        prune(target, *options)
        assert (*seen(target), target.findings() <= HARMLESS) == ("weights", "weights", True), number
        if rule.seen < number:
            break
    for column in (0, 1):
        column_seen = [row[column] for row in rows]
        turn = column_seen.index("weights")
        assert column_seen == ["whole"] * turn + ["weights"] * (len(rows) - turn) and turn > 0
    assert all(row[2] for row in rows), rows
