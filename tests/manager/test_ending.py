"""The end of a manager: by `close`, during a save, by an exception or signal, at exit, by SIGKILL."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import dcp
from tests.support.crashes import in_lab
from tests.support.manager_runs import (
    Failing,
    Gate,
    manager_of,
    plain_writer,
    state_at,
    steps_on_disk,
    writer_with,
)

# -- closing -------------------------------------------------------------------------------------------------


def test_close_is_bounded(tmp_path: Path) -> None:
    """`close` cancels a hanging save after its timeout; nothing of the save is visible, and managers work."""
    gate = Gate()
    manager = dcp.CheckpointManager(tmp_path, writer=writer_with(gate))
    future = manager.save(1, state_at(1))
    assert future is not None
    assert gate.reached.wait(240)
    manager.close(0.3)
    assert not future.done()
    with dcp.CheckpointManager(tmp_path, writer=plain_writer) as other:
        assert other.restore(state_at(-1)) is None
        other.save(2, state_at(2))
    assert other.all_steps() == [2]
    gate.open()
    future.exception(240)


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_the_exception_of_the_loop_is_raised(tmp_path: Path, on_failure: Any) -> None:
    """The loop's exception is raised: the save under way is committed, and a failed one does not hide it."""
    with (
        pytest.raises(ZeroDivisionError),
        dcp.CheckpointManager(tmp_path, writer=plain_writer, on_failure=on_failure) as manager,
    ):
        manager.save(1, state_at(1))
        raise ZeroDivisionError
    assert manager.all_steps() == [1]
    with (
        pytest.raises(ZeroDivisionError),
        dcp.CheckpointManager(tmp_path, writer=writer_with(Failing()), retries=0, on_failure=on_failure) as m,
    ):
        m.save(2, state_at(2))
        raise ZeroDivisionError
    assert m.failures == 1


def _save_in_fork(manager: dcp.CheckpointManager, report: Path) -> None:
    try:
        with manager:
            manager.save(2, state_at(2))
    except dcp.CheckpointError as error:
        report.write_text(f"{error} {manager.all_steps()} {manager.wait()}")


def _fork_while_saving(root: str, report: Path) -> tuple[int | None, list[int]]:
    """Use a manager in a fork while the parent saves; return the fork's exit code, and the saved steps."""
    gate = Gate()
    manager = dcp.CheckpointManager(root, writer=writer_with(gate))
    manager.save(1, state_at(1))
    gate.wait_until_reached()
    child = multiprocessing.get_context("fork").Process(target=_save_in_fork, args=(manager, report))
    child.start()
    child.join(120)
    ended = child.exitcode
    child.kill()
    gate.open()
    manager.close()
    return ended, manager.all_steps()


def test_a_forked_child_neither_saves_nor_waits(tmp_path: Path) -> None:
    """A fork, as a data loader's worker, must not wait at exit for threads that only the parent has."""
    report = tmp_path / "report"
    assert in_lab(_fork_while_saving, str(tmp_path / "run"), report) == (0, [1])
    assert "also in a forked child" in report.read_text() and report.read_text().endswith("[] True")


# -- SIGTERM -------------------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Yield the numbers of the signals received by a handler of the user."""
    gc.collect()  # managers dropped by earlier tests may still have a handler
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield numbers
    signal.signal(signal.SIGTERM, before)


def stops(manager: dcp.CheckpointManager, step: int) -> bool:
    """Save a step, and return whether the manager has noticed a stop."""
    manager.save(step, state_at(step))
    return manager.stop_requested


def test_the_users_handler_is_called_and_restored(tmp_path: Path, heard: list[int]) -> None:
    """SIGTERM reaches the user's handler and all open managers that handle it; the last `close` restores the
    user's handler."""
    users = signal.getsignal(signal.SIGTERM)
    deaf = manager_of(tmp_path / "c", every_steps=100, handle_sigterm=False)
    with manager_of(tmp_path / "a") as one, manager_of(tmp_path / "b") as other:
        one.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops(other, 1) and not one.stop_requested and not stops(deaf, 1)
    assert (other.all_steps(), deaf.all_steps()) == ([1], [])
    deaf.close()
    assert signal.getsignal(signal.SIGTERM) is users
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2


# -- elastic restart -----------------------------------------------------------------------------------------


def _elastic(root: Path) -> dict[str, Any]:
    """Sum random draws of all ranks, with saves; on the first start rank 1 is killed before step 7."""
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    random = torch.Generator().manual_seed(rank)
    weight, own = torch.zeros(16), dcp.PerRank({"random": random.get_state()})
    with manager_of(root, every_steps=2) as manager:
        restored = manager.restore(state := {"weight": weight, "own": own})
        random.set_state(own.value["random"])
        for step in range(first := restored.step + 1 if restored else 1, 10):
            if (life, rank, step) == (0, 1, 7):
                manager.wait(240)  # the committed steps must be known
                os.kill(os.getpid(), signal.SIGKILL)
            drawn = torch.rand(16, generator=random)
            dist.all_reduce(drawn)
            weight += drawn
            own.value = {"random": random.get_state()}
            manager.save(step, state, last=step == 9)
    dist.destroy_process_group()
    return {"life": life, "first": first, "weight": weight.tolist()}


@pytest.mark.timeout(900)
def test_a_run_resumes_after_torchrun_restarts_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a worker is killed before step 7, torchrun restarts all workers. They resume after step 6, and
    the weights equal those of an uninterrupted run bit for bit."""
    # Without it torch's init_process_group may find addresses of dead workers (its issue 135712).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 1}
    options |= {"monitor_interval": 0.1, "start_method": "forkserver", "run_id": uuid.uuid4().hex}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **options)
    with ThreadPoolExecutor(1) as other_thread:  # on the main thread it would replace the signal handlers
        results = other_thread.submit(elastic_launch(config, _elastic), tmp_path).result(800)
    weight = torch.zeros(16)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(9):
        weight += torch.rand(16, generator=generators[0]) + torch.rand(16, generator=generators[1])
    assert [results[rank] for rank in (0, 1)] == [{"life": 1, "first": 7, "weight": weight.tolist()}] * 2
    assert steps_on_disk(tmp_path) == [2, 4, 6, 8, 9]
