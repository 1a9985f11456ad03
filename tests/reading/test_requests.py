"""Reads from an object store: few and large requests, little excess data, and safe retries."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import StorageError
from dcp.storage.stores import ReadHandle
from tests.support.harmless_values import same
from tests.support.reading_places import Place, boxed, reader_of
from tests.support.recording import OBJECT_PROFILE, RecordingStore


def a_state() -> dict[str, Any]:
    """Return tensors of several kinds and sizes, plain values, and values that need a pickle."""
    return {
        "large": torch.randn(1500, 1000),
        **{f"small.{number}": torch.full((11,), float(number)) for number in range(300)},
        **{f"odd.{number}": slice(number) for number in range(200)},
        "step": 7,
        "channels": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    }


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the same names and shapes without values."""
    return {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for n, v in state.items()}


def test_a_load_reports_one_request_for_each_part() -> None:
    """Manifest, `.metadata`, tensors and objects are requested once each, as the report says."""
    state = a_state()
    place, wanted = Place().save(state), empty_like(state)
    before = place.store.traffic()
    report = place.load(wanted, weights_only=False)
    assert all(same(wanted[name], state[name]) for name in state)
    asked = {name: value - before.get(name, 0) for name, value in place.store.traffic().items()}
    assert report.storage == asked
    assert (asked["requests"], asked["get"], asked["head"], asked["list"]) == (5, 5, 0, 0)
    assert (report.blocks_verified, report.blocks_unverified) == (303, 0)
    place.forget()


@pytest.mark.parametrize("verify", ["blocks", "full", "none"])
def test_stock_checkpoints_are_opened_by_few_requests(tmp_path: Path, verify: str) -> None:
    """Records whose offset is only in their own header, also permuted ones, are opened in few requests."""
    state = a_state() | {"options": argparse.Namespace(lr=1)}
    stock.save(state, checkpoint_id=tmp_path, no_dist=True)
    place, wanted = Place().take(tmp_path), empty_like(state)
    wanted["large"] = torch.zeros(1000, 1500).T
    report = place.load(wanted, verify, weights_only=False)
    assert all(same(wanted[name], state[name]) for name in state)
    assert report.storage["requests"] <= 14
    assert (report.blocks_verified, report.blocks_unverified) == ((0, 0) if verify == "none" else (303, 0))
    place.forget()


def test_thousands_of_small_tensors_take_few_requests() -> None:
    """Casts, and boxes with distant rows, also take few requests, and every block read is verified."""
    state = {f"t{n}": torch.full((16, 20), n / 4) for n in range(1000)} | {"wide": torch.randn(300, 9000)}
    place = Place().save(state)
    wanted = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
    report = place.load(wanted, dtype="cast")
    assert all(torch.equal(wanted[name], state[name].double()) for name in state)
    assert len(place.store.reads) <= 5 and report.blocks_unverified == 0
    place.store.reads.clear()
    columns = {f"t{n}": boxed(torch.zeros(16, 5), (16, 20), (0, 7), (16, 5)) for n in range(1000)}
    report = place.load(columns, unexpected="ignore")
    assert all((columns[f"t{n}"] == n / 4).all() for n in range(1000))
    assert len(place.store.reads) <= 3 and (report.blocks_verified, report.blocks_unverified) == (1000, 0)
    place.forget()


def test_large_tensors_are_read_in_even_requests() -> None:
    """No request exceeds the store's size, and little beyond the tensors is read."""
    sizes = (9_000_000, 5_000, 21_000_000, 4 << 20)
    state = {
        f"t{n}": torch.full((size,), n, dtype=torch.uint8).index_fill_(0, torch.tensor([size // 3]), 9)
        for n, size in enumerate(sizes)
    }
    place, wanted = Place().save(state), empty_like(state)
    report = place.load(wanted)
    assert all(torch.equal(wanted[name], state[name]) for name in state)
    assert max(note.size_bytes for note in place.store.reads) <= OBJECT_PROFILE.request_bytes
    assert len(place.store.reads) <= 7 and report.blocks_unverified == 0
    assert report.bytes_read - report.bytes_needed < 4096
    place.forget()


@pytest.mark.parametrize(("size", "most"), [(100_000, 1.0), (40_000, 1.6), (20_000, 1.9)])
def test_unwanted_tensors_are_skipped(size: int, most: float) -> None:
    """Unwanted tensors between wanted ones are skipped, though each gap alone is small enough to read."""
    state = {f"t{n:03}": torch.full((size,), n % 251, dtype=torch.uint8) for n in range(200)}
    place = Place().save(state)
    wanted = {name: torch.zeros_like(value) for name, value in list(state.items())[::2]}
    report = place.load(wanted, unexpected="ignore")
    assert all(torch.equal(tensor, state[name]) for name, tensor in wanted.items())
    assert report.bytes_read <= most * report.bytes_needed
    place.forget()


@pytest.mark.parametrize("verify", ["blocks", "full"])
def test_only_near_rows_are_read_together(verify: str) -> None:
    """Of rows of 1 MiB only the wanted columns are read, unless verify="full" needs the rest; rows of 100 KiB
    are read whole in large requests."""
    state = {"wide": torch.randn(24, 1 << 18), "narrow": torch.randn(200, 25_000)}
    place = Place().save(state)
    wide = {"wide": boxed(torch.zeros(24, 5000), (24, 1 << 18), (0, 77), (24, 5000))}
    report = place.load(wide, verify, unexpected="ignore")
    assert torch.equal(wide["wide"], state["wide"][:, 77:5077])
    if verify == "blocks":
        assert len(place.store.reads) == 24 and report.bytes_read <= report.bytes_needed + 77 * 4
    else:
        assert report.blocks_verified == 6 and report.bytes_read == state["wide"].nbytes
    place.store.reads.clear()
    narrow = {"narrow": boxed(torch.zeros(200, 9000), (200, 25_000), (0, 16_000), (200, 9000))}
    report = place.load(narrow, verify, unexpected="ignore")
    assert torch.equal(narrow["narrow"], state["narrow"][:, 16_000:])
    assert len(place.store.reads) <= 5 and report.blocks_unverified == 0
    place.forget()


class _BrokenOnce(RecordingStore):
    """A store whose requests break off after ``share`` of their bytes, all wrong, and are repeated."""

    share = 0.5

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        inner: Any = super().open_read(name, expected_bytes=expected_bytes)
        receive = inner.receive

        def broken(inflow: Any, offset: int) -> None:
            left = inflow.size_bytes * self.share
            for buffer in inflow.buffers():
                buffer[:] = b"\xa5" * len(buffer)
                left -= len(buffer)
                if left <= 0:
                    break
            receive(inflow, offset)

        inner.receive = broken
        return inner  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("verify", ["blocks", "full", "none"])
def test_a_failed_attempt_is_not_counted(verify: str, share: float) -> None:
    """After a repeated request small runs, large runs and boxes are right, and each block is counted once."""
    state = {f"s{n}": torch.full((600,), n % 251, dtype=torch.uint8) for n in range(400)}
    state |= {"large": torch.randint(0, 250, (9_000_000,), dtype=torch.uint8), "box": torch.randn(700, 300)}
    place = Place(_BrokenOnce)
    place.store.share = share
    place.save(state)
    wanted = empty_like(state) | {"box": boxed(torch.zeros(700, 100), (700, 300), (0, 100), (700, 100))}
    report = place.load(wanted, verify)
    assert all(torch.equal(wanted[name], state[name]) for name in state if name != "box")
    assert torch.equal(wanted["box"], state["box"][:, 100:200])
    assert (report.blocks_verified, report.blocks_unverified) == (0 if verify == "none" else 400 + 3 + 1, 0)
    place.forget()


class _Watched(RecordingStore):
    """A store that calls ``at_get`` at each read of a data file."""

    at_get: Callable[[], None] | None = None

    def note(self, op: str, received_bytes: int = 0) -> None:
        super().note(op, received_bytes)
        if op == "get" and received_bytes > 1 << 20 and self.at_get is not None:
            self.at_get()


def test_a_large_box_is_read_by_all_threads() -> None:
    """One column shard of one large tensor is read by several threads at a time."""
    stored = torch.randint(0, 1 << 15, (2000, 8000), dtype=torch.int16)
    place = Place(_Watched).save({"t": stored})
    together, met = threading.Barrier(3), list[int]()

    def meet() -> None:
        if len(met) < 3:
            met.append(1)
            together.wait(240)

    place.store.at_get = meet
    part = {"t": boxed(torch.zeros(2000, 4000, dtype=torch.int16), (2000, 8000), (0, 4000), (2000, 4000))}
    report = place.load(part)
    assert torch.equal(part["t"], stored[:, 4000:])
    assert report.blocks_unverified == 0 and report.bytes_read == stored.nbytes
    place.forget()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, StorageError])
def test_no_read_outlives_a_failed_load(failure: type[BaseException]) -> None:
    """If a read fails or is interrupted, the load waits for the other reads before it raises, because they
    write to memory that the caller may free."""
    place = Place(_Watched).save({f"t{n}": torch.full((8 << 20,), n, dtype=torch.uint8) for n in range(3)})
    begun, release, first, ended = threading.Barrier(3), threading.Event(), threading.Lock(), list[int]()

    def hold() -> None:
        begun.wait(60)
        if first.acquire(blocking=False):
            raise failure("now")
        assert release.wait(60)
        ended.append(1)

    place.store.at_get = hold
    wanted = {f"t{n}": torch.zeros(8 << 20, dtype=torch.uint8) for n in range(3)}
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(dcp.load, wanted, storage_reader=reader_of(place), no_dist=True)
        while not first.locked():
            threading.Event().wait(0.001)
        assert not left.done()
        release.set()
        assert isinstance(left.exception(60), failure)
    assert len(ended) == 2
    place.store.at_get = None
    place.forget()
