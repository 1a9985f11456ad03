"""A state that changes while it is copied: no checkpoint, an error that names the tensor, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.background.session import AsyncSession
from dcp.staging.copies import HostCopier, HostCopies
from dcp.staging.guarding.samples import Guard
from dcp.staging.stager import DefaultStager
from dcp.storage.formats.index import Int64
from tests.support.ranks import run_ranks
from tests.support.versions import listing, seen_by_dcp, version_state

TIMEOUT_SECONDS = 240.0
NAMES = ("model.w", "model.layers.0", "model.layers.1", "model.half", "large")


def tensor_of(state: dict[str, Any], name: str) -> torch.Tensor:
    """A tensor of a state dict by its dotted name."""
    value: Any = state
    for key in name.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    assert isinstance(value, torch.Tensor)
    return value


class Meddler:
    """Changes a tensor while it is being copied: from after the samples of it were taken until the end."""

    def __init__(self) -> None:
        self.copying = threading.Event()
        self.changed = threading.Event()
        self.active = False

    @contextmanager
    def changing(self, tensor: torch.Tensor, element: int | None = None) -> Iterator[None]:
        """Change ``tensor``, or one element of it, again and again until the block is left."""
        target = tensor if element is None else tensor.view(-1)[element]
        left = threading.Event()

        def change() -> None:
            self.copying.wait(TIMEOUT_SECONDS)
            while not left.is_set():
                target.add_(1)
                self.changed.set()

        self.copying.clear()
        self.changed.clear()
        self.active = True
        thread = threading.Thread(target=change)
        thread.start()
        try:
            yield
        finally:
            self.active = False
            left.set()
            self.copying.set()
            thread.join()

    def copies_begin(self) -> None:
        """Called by the copier; returns when the tensor has changed once."""
        if self.active:
            self.copying.set()
            assert self.changed.wait(TIMEOUT_SECONDS)

    def stager(self, guard: Guard, *, process: bool) -> DefaultStager:
        """One that can be meddled with."""
        stager = DefaultStager(guard=guard, process=process)
        stager._copier.host = _MeddledCopier(self)
        return stager


class _MeddledCopier(HostCopier):
    def __init__(self, meddler: Meddler) -> None:
        super().__init__(1)
        self.meddler = meddler

    def copy(self, copies: HostCopies, rows: Int64) -> None:
        self.meddler.copies_begin()
        super().copy(copies, rows)


def meddle(
    session: AsyncSession, meddler: Meddler, folder: Path, *, rounds: int, guard: Guard, here: bool = True
) -> list[tuple[list[str], list[int], bool]]:
    """For each round a save that is meddled with (``here``: on this rank) and one that is not.

    By round: the tensors and the ranks that the error names, and whether this rank's own staging failed.
    """
    found = []
    for number in range(rounds):
        name = NAMES[number % len(NAMES)]
        state = version_state(number + 1, large=1 << 16)
        tensor = tensor_of(state, name)
        # one element is enough where all are looked at
        element = tensor.numel() // 2 if guard == "full" else None
        writer = dcp.FileSystemWriter(folder / str(number), sync_files=False)
        with meddler.changing(tensor, element) if here else nullcontext():
            future = session.save(state, storage_writer=writer, overlap=number % 2 == 0)
            error = future.exception(TIMEOUT_SECONDS)
        assert isinstance(error, dcp.errors.StagingError), error
        assert listing(folder / str(number)) == {}
        own = isinstance(future.staging_completion.exception(TIMEOUT_SECONDS), dcp.errors.StagingError)
        named = [each for each in (*NAMES, "model.count", "model.empty") if f"'{each}'" in str(error)]
        found.append((named, list(getattr(error, "ranks", [])), own))
        session.save(
            version_state(number + 1, large=1 << 16), storage_writer=writer, overlap=number % 3 == 0
        ).result(TIMEOUT_SECONDS)
    return found


@pytest.mark.parametrize("guard", ["sampled", "full"])
def test_every_save_is_guarded_not_only_the_first(tmp_path: Path, guard: Guard) -> None:
    """Another thread changes a tensor (or, where all bytes are compared, one element) during each second
    save: StagingError that names it and no other, nothing committed, and the save after it is whole."""
    meddler = Meddler()
    stager = meddler.stager(guard, process=False)
    session = AsyncSession(no_dist=True, stager=stager, timeout_seconds=TIMEOUT_SECONDS)
    rounds = 2 * len(NAMES)
    found = meddle(session, meddler, tmp_path, rounds=rounds, guard=guard)
    session.close()
    stager.close()
    assert found == [([NAMES[number % len(NAMES)]], [0], True) for number in range(rounds)]
    assert [seen_by_dcp(tmp_path / str(n), large=1 << 16) for n in range(rounds)] == list(
        range(1, rounds + 1)
    )


def test_saves_by_a_process_are_guarded(tmp_path: Path) -> None:
    """The trainer finds it out, the writer process is told, and serves the next save."""
    meddler = Meddler()
    stager = meddler.stager("sampled", process=True)
    kind = dcp.AsyncCheckpointerType.PROCESS
    session = AsyncSession(no_dist=True, kind=kind, stager=stager, timeout_seconds=TIMEOUT_SECONDS)
    found = meddle(session, meddler, tmp_path, rounds=3, guard="sampled")
    session.close()
    stager.close()
    assert found == [([name], [0], True) for name in NAMES[:3]]
    assert [seen_by_dcp(tmp_path / str(number), large=1 << 16) for number in range(3)] == [1, 2, 3]


def meddle_on_one_rank(rank: int, world_size: int, root: Path) -> list[Any]:
    """Rank 1's state changes during its copies."""
    meddler = Meddler()
    stager = meddler.stager("sampled", process=False)
    session = AsyncSession(stager=stager, timeout_seconds=TIMEOUT_SECONDS)
    found = meddle(session, meddler, root, rounds=3, guard="sampled", here=rank == 1)
    session.close()
    stager.close()
    return found


def test_one_ranks_changed_state_fails_the_save_on_all(tmp_path: Path) -> None:
    """All ranks get the StagingError that names rank 1 and its tensor; the other rank's copy was good."""
    for rank, found in enumerate(run_ranks(2, meddle_on_one_rank, tmp_path)):
        assert found == [([name], [1], rank == 1) for name in NAMES[:3]]
    assert [seen_by_dcp(tmp_path / str(number), large=1 << 16) for number in range(3)] == [1, 2, 3]
