"""Subprocesses of a warm process: started quickly, watched, killed, and never left behind."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp.server.jobs.executors.executor import ProcessExecutor
from dcp.server.jobs.executors.opening import open_executor
from dcp.server.jobs.executors.subprocess_main import Setup, error_of
from dcp.server.jobs.executors.subprocess_messages import Messages, Order, receive_message, send_message
from dcp.server.jobs.executors.subprocesses import ProcessOutcome, WarmProcessPool
from dcp.server.jobs.kind import PermanentJobError, TransientJobError, is_retryable
from dcp.server.problems import NotFoundError, UnavailableError
from dcp.server.settings import Settings
from dcp.storage.errors import CheckpointConflictError, CorruptCheckpointError, StorageError
from tests.support.job_kinds import TEST_KINDS, log_lines
from tests.support.job_workers import HANG_SECONDS, until
from tests.support.processes import environment_of, open_files, parent_of


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcessPool]:
    """One for several tests."""
    made = WarmProcessPool(Setup(Settings(work_folder=tmp_path_factory.mktemp("pool")), TEST_KINDS))
    yield made
    made.close()


class Begun:
    """A task of the kind "made" in a subprocess."""

    def __init__(self, pool: WarmProcessPool, folder: Path, act: str, **changes: Any) -> None:
        payload = {"folder": str(folder), "act": act, "number": 0, **changes.pop("payload", {})}
        values = {"kind": "made", "phase": "task", "job_id": 1, "attempt_name": "1-0-1", "task_number": 0}
        self.told: list[int] = []
        self._outcome: list[ProcessOutcome] = []
        self._ended = threading.Event()
        self.child = pool.start(
            Order(**values | {"payload": payload} | changes),  # type: ignore[arg-type]
            self.told.append,
            self._end,
        )

    def _end(self, outcome: ProcessOutcome) -> None:
        self._outcome.append(outcome)
        self._ended.set()

    def outcome(self) -> ProcessOutcome:
        """Once it has ended."""
        assert self._ended.wait(HANG_SECONDS)
        assert len(self._outcome) == 1
        return self._outcome[0]

    def failure(self) -> tuple[str, bool]:
        """The type of its error, and whether another attempt may help."""
        error = self.outcome().error
        assert error is not None and self.outcome().result is None
        return error.type, error.is_retryable


def test_results_progress_and_errors(pool: WarmProcessPool, tmp_path: Path) -> None:
    """What a task returns, how far it is, why it failed, and how it died."""
    slow = Begun(pool, tmp_path, "sleep:0.5")
    assert slow.outcome() == ProcessOutcome(result={"number": 0, "roots": ["checkpoints"]})
    assert slow.told == sorted(slow.told)
    assert Begun(pool, tmp_path, "fail").failure() == ("PermanentJobError", False)
    assert Begun(pool, tmp_path, "fail_once").failure() == ("TransientJobError", True)
    died = Begun(pool, tmp_path, "die")
    assert died.failure() == ("TaskProcessError", True)
    assert "signal 9" in (died.outcome().error or died).detail  # type: ignore[union-attr]
    assert Begun(pool, tmp_path, "exit:3").failure() == ("TaskProcessError", True)


def test_large_orders_and_results_pass(pool: WarmProcessPool, tmp_path: Path) -> None:
    """Plans and results of many tasks are more than a socket holds at a time."""
    results = tuple({"number": n, "text": "x" * 100} for n in range(20_000))
    plan_data = {"folder": str(tmp_path), "act": "write"}
    begun = Begun(pool, tmp_path, "", phase="publish", plan_data=plan_data, results=results, task_number=None)
    result = begun.outcome().result
    assert result is not None and result["parts"] == 20_000
    assert result["text"] == "\n".join(str(n) for n in range(20_000))


def test_what_is_no_json_is_an_error_of_the_kind(pool: WarmProcessPool, tmp_path: Path) -> None:
    """A result that the ledger cannot keep fails for good; so does an order that no kind understands."""
    assert Begun(pool, tmp_path, "nan").failure() == ("ValueError", False)
    assert Begun(pool, tmp_path, "write", phase="plan", params={"acts": 1}).failure() == (
        "ValidationError",
        False,
    )
    assert Begun(pool, tmp_path, "write", kind="unknown").failure() == ("KeyError", False)


def test_memory_is_bounded(pool: WarmProcessPool, tmp_path: Path) -> None:
    """What takes more is killed, also if it takes it faster than anybody looks, and is not tried again."""
    limit = 256 << 20
    assert Begun(pool, tmp_path, "take:500", memory_bytes=limit).failure() == ("TaskMemoryError", False)
    assert Begun(pool, tmp_path, "grab:4000", memory_bytes=limit).failure() == ("TaskMemoryError", False)
    assert Begun(pool, tmp_path, "write", memory_bytes=limit).outcome().error is None


def test_time_is_bounded(pool: WarmProcessPool, tmp_path: Path) -> None:
    """What hangs is killed, whatever it holds on to, and is tried again."""
    assert Begun(pool, tmp_path, "hold:1000", seconds=0.3).failure() == ("TaskTimeoutError", True)


def test_killing(pool: WarmProcessPool, tmp_path: Path) -> None:
    """At any instant: as it begins, in its middle, when it is over; nothing of it runs when that is told."""
    at_once = Begun(pool, tmp_path, "hold:1000")
    pool.kill(at_once.child)
    assert at_once.outcome() == ProcessOutcome()
    deaf = Begun(pool, tmp_path, "hold:1000")
    until(lambda: len(log_lines(tmp_path)) > 0, "its beginning")
    until(lambda: deaf.child.pid is not None, "its number")
    pool.kill(deaf.child)
    assert deaf.outcome() == ProcessOutcome() and not Path(f"/proc/{deaf.child.pid}").exists()
    over = Begun(pool, tmp_path, "write")
    result = over.outcome()
    pool.kill(over.child)
    assert over.outcome() == result and result.result is not None


def test_the_warm_process_has_no_threads_and_no_secrets(pool: WarmProcessPool, tmp_path: Path) -> None:
    """A fork of a process with other threads may hang; settings of the service are not in its environment."""
    begun = Begun(pool, tmp_path, "wait:go")
    until(lambda: begun.child.pid is not None, "its number")
    warm = parent_of(begun.child.pid or 0)
    assert len(list(Path(f"/proc/{warm}/task").iterdir())) == 1
    assert b"DCP_SERVER_" not in Path(f"/proc/{begun.child.pid}/environ").read_bytes()
    maps = Path(f"/proc/{begun.child.pid}/maps").read_text()
    assert "libtorch" not in maps and "numpy" in maps
    (tmp_path / "go").touch()
    assert begun.outcome().error is None


def test_the_next_one_starts_warm(pool: WarmProcessPool, tmp_path: Path) -> None:
    """It costs a small part of what importing costs; many at once do no harm."""
    Begun(pool, tmp_path, "write").outcome()
    begun = time.perf_counter()
    tasks = [Begun(pool, tmp_path, "write") for _ in range(30)]
    assert all(task.outcome().result for task in tasks)
    print(f"a subprocess takes {(time.perf_counter() - begun) / 30 * 1000:.1f} ms")


def test_closing_kills_and_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is told to be killed; no process, no folder and no descriptor is left."""
    monkeypatch.setenv("DCP_SERVER_DATABASE_URL", "postgresql://user:SECRET@host/")
    settings = Settings(work_folder=tmp_path / "work", database_url="sqlite:///x")  # type: ignore[arg-type]
    before = Counter(open_files())
    executor = ProcessExecutor(Setup(settings, TEST_KINDS))
    pool = executor._pool
    begun = [Begun(pool, tmp_path, "hold:1000"), Begun(pool, tmp_path, "keep")]
    until(lambda: begun[0].child.pid is not None, "its number")
    environment = environment_of(begun[0].child.pid or 0)
    assert environment and b"SECRET" not in environment and b"DCP_SERVER" not in environment
    begun[1].outcome()
    executor.close()
    assert begun[0].outcome() == ProcessOutcome()
    assert not Path(f"/proc/{begun[0].child.pid}").exists()
    assert list((tmp_path / "work").iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        Begun(pool, tmp_path, "write")
    gc.collect()
    assert not Counter(open_files()) - before  # what other tests left may have been closed meanwhile


def test_kinds_that_cannot_be_imported_fail_the_attempt(tmp_path: Path) -> None:
    """The warm process ends, and whoever waits is told; the next attempt starts another one."""
    pool = WarmProcessPool(Setup(Settings(work_folder=tmp_path / "work"), "dcp.no_such:KINDS"))
    for _ in range(2):
        assert Begun(pool, tmp_path, "write").failure() == ("TaskProcessError", True)
    pool.close()


def test_messages_arrive_whole_and_in_order() -> None:
    """However they are cut on their way; the end within one is no message."""
    ours, theirs = socket.socketpair()
    messages = Messages(ours)
    assert messages.read() == ([], True)
    send_message(theirs, {"a": 1})
    theirs.sendall(b"\x0a\x00\x00\x00")
    assert messages.read() == ([{"a": 1}], True)
    theirs.sendall(b'{"b":"bb"}\x02\x00\x00\x00{}\x05\x00\x00\x00{')
    theirs.close()
    assert messages.read() == ([{"b": "bb"}, {}], False)
    ours.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ValueError, match="longer"):
            Messages(ours).read()
        with pytest.raises(ValueError, match="not JSON compliant"):
            send_message(theirs, {"x": float("inf")})
    ours, theirs = socket.socketpair()
    with ours:
        send_message(theirs, {"c": [1]})
        theirs.close()
        assert receive_message(ours) == {"c": [1]}
        with pytest.raises(EOFError):
            receive_message(ours)


def test_which_errors_are_worth_another_attempt() -> None:
    """Storage and network that may come back; not what is damaged, refused or a mistake."""
    again = (TransientJobError(), StorageError(), ConnectionError(), TimeoutError(), UnavailableError("x"))
    never = (
        PermanentJobError(),
        CorruptCheckpointError(),
        CheckpointConflictError(),
        NotFoundError("x"),
        ValueError(),
        KeyError(),
    )
    assert all(map(is_retryable, again)) and not any(map(is_retryable, never))
    told = error_of(StorageError("https://user:SECRET@host/ is away"))
    assert told.is_retryable and "SECRET" not in told.detail


def test_executors_by_name() -> None:
    """Only those that there are."""
    with pytest.raises(ValueError, match="'processes' or 'dask://HOST:PORT'"):
        open_executor(Settings(executor="threads"), TEST_KINDS)
