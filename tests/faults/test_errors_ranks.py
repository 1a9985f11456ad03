"""Failure of one rank of two: at every storage operation, and in every phase of a save and of a load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.errors import StorageError, StorageFullError
from tests.support.fault_doors import Fault, OpenWithFaults, StoreCall
from tests.support.rank_acts import act_in_phase
from tests.support.ranks import run_ranks
from tests.support.versions import (
    ABSENT,
    copy_folder,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    version_state,
)

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
TIMEOUT_SECONDS = 120.0


@dataclass
class Raised:
    """Error of one rank: class and base classes, the ranks named, and the message."""

    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    message: str = ""
    committed: bool = False
    cause: str = ""


def _outcome(act: Callable[[], Any]) -> Raised | None:
    try:
        act()
    except (dcp.RankFailedError, KeyboardInterrupt) as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__)
        if not isinstance(error, dcp.RankFailedError):
            return Raised(names, message=str(error))
        committed = bool(error.facts.get("committed"))
        cause = type(error.__cause__ or error.__context__).__name__
        return Raised(names, tuple(error.ranks), str(error), committed, cause)
    return None


def _gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _faulty_save(folder: Path, *faults: Fault, planner: Any = None) -> tuple[Raised | None, list[StoreCall]]:
    opener = OpenWithFaults(*faults)
    writer = dcp.FileSystemWriter(folder, open_store=opener)
    state, more = version_state(NEW), {"planner": planner, "timeout_seconds": TIMEOUT_SECONDS}
    return _outcome(lambda: dcp.save(state, storage_writer=writer, **more)), opener.log


def fail_at_every_operation(rank: int, world_size: int, root: Path, faulty: int, old: int | str) -> list[Any]:
    """Return (operation, error of each rank, state of the folder) for each operation of rank ``faulty``."""
    if rank == 0 and old == OLD:
        save_version(root / "before", OLD)
    rows: list[Any] = []
    number = 0
    while True:
        number += 1
        folder = root / str(number)
        if rank == 0:
            copy_folder(root / "before", folder)
        dist.barrier()
        faults = [Fault(at=number, error=StorageFullError("injected"))] if rank == faulty else []
        raised, log = _faulty_save(folder, *faults)
        everything = _gathered((raised, len(log)))
        if everything[faulty][1] < number:
            return rows
        if rank == 0:
            seen = seen_by_dcp(folder), seen_by_stock(folder), listing(folder)
            save_version(folder, NEXT)
            after = seen_by_dcp(folder), listing(folder)
        op = _gathered(log[number - 1].op if rank == faulty else None)[faulty]
        if rank == 0:
            rows.append((op, [entry[0] for entry in everything], seen, after))


@pytest.mark.parametrize(
    ("faulty", "old"),
    [(0, OLD), (1, ABSENT)]
    + [pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((0, ABSENT), (1, OLD))],
)
def test_an_error_on_one_rank_undoes_the_save(tmp_path: Path, faulty: int, old: int | str) -> None:
    """Both raise StorageFullError naming the rank; the old checkpoint stays and no new file remains."""
    rows = run_ranks(2, fail_at_every_operation, tmp_path, faulty, old)[0]
    failed = 0
    for op, raised, (seen, by_stock, files), after in rows:
        where = f"{op}: {raised}, {files}"
        if raised[0] is None:
            assert raised[1] is None, where
            assert op in ("abort_uploads", "delete", "read", "version"), where
            assert seen == NEW, where
        else:
            failed += 1
            for one in raised:
                assert "StorageFullError" in one.names, where
                assert "RankFailedError" in one.names, where
                assert one.ranks == (faulty,), where
                assert "injected" in one.message
                assert one.cause == "StorageFullError"
            assert raised[0].committed == raised[1].committed, where
            if raised[0].committed:
                assert (seen, op) == (NEW, "publish"), where
            else:
                assert (seen, by_stock) == (old, old), where
                assert files == (CLEAN if old == OLD else {}), where
        assert after == (NEXT, CLEAN), where
    assert failed >= (10 if faulty == 0 else 4)


def _interrupted_save(rank: int, world_size: int, folder: Path, who: int) -> Any:
    def interrupt(operation: StoreCall) -> None:
        raise KeyboardInterrupt

    faults = [Fault("write", hook=interrupt)] if rank == who else []
    raised, _ = _faulty_save(folder, *faults)
    dist.barrier()
    return raised, listing(folder), _outcome(lambda: dcp.save(version_state(NEXT), checkpoint_id=folder))


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_on_one_rank_undoes_the_save(tmp_path: Path, who: int) -> None:
    """The interrupted rank raises KeyboardInterrupt, the other RankFailedError; no file remains."""
    results = run_ranks(2, _interrupted_save, tmp_path / "x", who)
    own, files, again = results[who]
    assert own.names[0] == "KeyboardInterrupt"
    other = results[1 - who][0]
    assert "RankFailedError" in other.names
    assert other.ranks == (who,)
    assert "KeyboardInterrupt" in other.message
    assert files == {}
    assert again is None
    assert seen_by_dcp(tmp_path / "x") == NEXT


# -- phases --------------------------------------------------------------------------------------------------


class Boom(Exception):
    """Error of user code, outside of the classes of dcp."""


OBJECT_PHASES = ("create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "commit_tensor")
STORE_PHASES = ("write", "publish", "index", "read")
SPOILED: dict[str, dict[str, Any]] = {
    "create_local_columns": {"bad": torch.zeros(4, 4).to_sparse()},
    "global plan": {"model": {"w": torch.zeros(5)}},
    "plan": {"in plan": torch.zeros(3)},
}
"""State of one rank that makes a phase fail, for phases in which no call can be made to fail."""


def _failing(rank: int, world_size: int, folder: Path, version: int, phase: str, who: int) -> Any:
    """Return the error of a rank of a save, or of a load if ``version`` is 0, in which rank ``who`` fails;
    the files left; and the result of the next operation."""

    def fail(*args: Any, **options: Any) -> None:
        raise (StorageError if phase in STORE_PHASES else Boom)(f"in {phase}")

    more = SPOILED.get(phase, {}) if rank == who else {}
    act = fail if rank == who and phase not in SPOILED else None
    by_objects = phase in OBJECT_PHASES
    raised = _outcome(
        lambda: act_in_phase(
            folder, phase, act, version=version, by_objects=by_objects, timeout_seconds=120, **more
        )
    )
    left = _gathered(listing(folder))[0]
    again = _outcome(lambda: act_in_phase(folder, "", None, version=version and NEXT))
    return raised, left, again


@pytest.mark.parametrize(
    "phase",
    [
        "state_dict",
        "set_up_planner",
        "create_local_columns",
        "global plan",
        "write",
        "publish",
        *OBJECT_PHASES[:-1],
    ],
)
def test_an_error_in_any_save_phase_fails_all_ranks(tmp_path: Path, phase: str) -> None:
    """All three raise RankFailedError with rank and cause; no file is left, and the next save works."""
    who = 0 if phase in ("publish", "global plan", "create_global_plan") else 1
    results = run_ranks(3, _failing, tmp_path / "x", NEW, phase, who)
    for raised, left, again in results:
        assert {"RankFailedError", "CheckpointException"} <= {*raised.names}
        assert (raised.ranks, left, again) == ((who,), {}, None)
        assert f"in {phase}" in raised.message or phase in SPOILED
    if phase not in SPOILED and phase not in STORE_PHASES:
        causes = [raised.cause for raised, _, _ in results]
        assert causes.pop(who) == "Boom" and set(causes) == {"RemoteError"}
    assert seen_by_dcp(tmp_path / "x") == NEXT


@pytest.mark.parametrize(
    "phase", ["state_dict", "index", "plan", "read", "create_local_plan", "commit_tensor"]
)
def test_an_error_in_any_load_phase_fails_all_ranks(tmp_path: Path, phase: str) -> None:
    """All three raise RankFailedError with rank and cause; the next load on the same ranks works."""
    save_version(tmp_path / "x", OLD)
    who = 0 if phase == "index" else 1
    kind = {"plan": "MissingKeyError", "index": "StorageError", "read": "StorageError"}.get(
        phase, "RankFailedError"
    )
    for raised, _, again in run_ranks(3, _failing, tmp_path / "x", 0, phase, who):
        assert {"RankFailedError", kind} <= {*raised.names}
        assert (raised.ranks, again) == ((who,), None)
        assert f"in {phase}" in raised.message
