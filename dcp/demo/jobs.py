"""Starting training jobs and commands as processes, with bounded waits, and ending all that they started."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dcp.demo.places import FolderPlace, Place
from dcp.demo.training.launch import Launch, start, start_stock
from dcp.demo.training.rank_notes import KILL_VARIABLE, rank_note, start_ticks

__all__ = ["DemoError", "JobOutcome", "Workplace", "environ_of", "import_path", "start_dcp"]

_JOB_SECONDS = 300.0
_COMMAND_SECONDS = 120.0
_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
_SHOWN_LOG_LINES = 40


class DemoError(Exception):
    """The demo cannot go on: a job that should have run did not."""


@dataclass
class JobOutcome:
    """What a training job left behind: exit status, the log by step, digests of what it saved and loaded."""

    name: str
    exit_code: int
    seconds: float
    results: Path
    losses: dict[int, float] = field(default_factory=dict)
    looks: dict[int, list[float]] = field(default_factory=dict)

    def digests(self, name: str) -> dict[str, str]:
        """The digests noted as ``saved-STEP`` or ``loaded-STEP``; none if the job did not come that far."""
        path = self.results / f"{name}.json"
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return found


@dataclass
class Workplace:
    """The folder of one demo: the text, logs and results by job; and the place of the checkpoints."""

    root: Path
    place: Place
    steps: int
    save_every: int

    @property
    def corpus(self) -> Path:
        """The text that all jobs read."""
        return self.root / "corpus.txt"

    def train(
        self,
        name: str,
        ranks: int,
        *,
        checkpoints: str,
        writer: str = "thread",
        kill_at: str | None = None,
        on_step: Callable[[int, float], None],
    ) -> JobOutcome:
        """Run one training job, started as by torchrun, to its end, or its death if ``kill_at`` is given.

        It goes on from the newest good checkpoint of its folder, and saves behind the training loop, in a
        thread or in a ``writer`` process by rank.

        Raises DemoError, with the end of the job's log, if it fails or takes longer than five minutes.
        """
        results = self.root / "results" / name
        results.mkdir(parents=True)
        log = self.root / "logs" / f"{name}.txt"
        log.parent.mkdir(exist_ok=True)
        begun = time.monotonic()
        process = start(self._launch(ranks, results, log, checkpoints, writer, kill_at))
        try:
            exit_code = _await(process, results / "losses.jsonl", on_step)
        finally:
            _end(process, results, ranks)
        outcome = JobOutcome(name, exit_code, time.monotonic() - begun, results)
        _read_log(results / "losses.jsonl", outcome)
        if exit_code != 0 and not kill_at:
            raise DemoError(f"the job {name!r} failed with exit code {exit_code}:\n{_tail(log)}")
        return outcome

    def _launch(
        self, ranks: int, results: Path, log: Path, checkpoints: str, writer: str, kill_at: str | None
    ) -> Launch:
        arguments = {
            "--corpus": self.corpus,
            "--checkpoints": self.place.root(checkpoints),
            "--results": results,
            "--steps": self.steps,
            "--save-every": self.save_every,
            "--writer": writer,
        }
        extra = {**self.place.environment, **({KILL_VARIABLE: kill_at} if kill_at else {})}
        return Launch(
            ranks=ranks,
            arguments=tuple(str(part) for pair in arguments.items() for part in pair),
            environment=environ_of(extra),
            log=log,
        )

    def load_with_stock_torch(self, folders: Sequence[str]) -> dict[str, Any]:
        """What a process says that loads ``folders``, the first of which is damaged; DemoError if it fails,
        or after two minutes."""
        log = self.root / "logs" / "stock.txt"
        process = start_stock(folders, environ_of(self.place.environment), log)
        process.join(_COMMAND_SECONDS)
        if process.exitcode != 0:
            process.kill()
            raise DemoError(f"the process that loads with stock torch failed:\n{_tail(log)}")
        found: dict[str, Any] = json.loads(log.read_text())
        return found

    def command(self, *arguments: str) -> tuple[int, str]:
        """The exit status of ``dcp ARGUMENTS`` and what it printed; DemoError after two minutes.

        It runs where relative checkpoints are, in a fork of this process.
        """
        folder = self.place.folder if isinstance(self.place, FolderPlace) else self.root
        with tempfile.TemporaryFile("w+", encoding=sys.stdout.encoding, errors="replace") as output:
            process = start_dcp(arguments, folder, environ_of(self.place.environment), output.fileno())
            process.join(_COMMAND_SECONDS)
            if process.exitcode is None:
                process.kill()
                raise DemoError(f"dcp {' '.join(arguments)} took longer than {_COMMAND_SECONDS:g} seconds")
            output.seek(0)
            return process.exitcode, output.read()


def start_dcp(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
) -> BaseProcess:
    """``dcp ARGUMENTS`` in ``folder``, which prints to the descriptor ``output``, as a fork of this
    process."""
    details = (arguments, folder, environment, output)
    process = multiprocessing.get_context("fork").Process(target=_run_dcp, args=details)
    process.start()
    return process


def _run_dcp(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    sys.argv[1:] = arguments
    importlib.import_module("dcp.cli").main()


def import_path() -> list[str]:
    """Where a process that is started elsewhere finds this package."""
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return [str(Path(__file__).parents[2]), *given]


def environ_of(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what another launcher may have set in it."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("TORCHELASTIC_", "PET_", "DCP_DEMO_"))
    }
    # One thread a rank: two cores, and sums whose order does not depend on the machine's.
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if Path("/sys/class/net/lo").exists():
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept | dict(extra)


def _await(process: BaseProcess, log: Path, on_step: Callable[[int, float], None]) -> int:
    give_up = time.monotonic() + _JOB_SECONDS
    shown = 0
    while True:
        process.join(_POLL_SECONDS)
        if process.exitcode is not None:
            return process.exitcode
        lines = _log_lines(log)
        if lines and lines[-1]["step"] != shown:
            shown = int(lines[-1]["step"])
            on_step(shown, lines[-1]["loss"])
        if time.monotonic() > give_up:
            raise DemoError(f"a job did not end within {_JOB_SECONDS:g} seconds: {log.parent.name}")


def _end(process: BaseProcess, results: Path, ranks: int) -> None:
    """End the launcher, then the ranks: no process of the job outlives it."""
    process.kill()
    process.join()
    notes = [note.read_text() for rank in range(ranks) if (note := rank_note(results, rank)).exists()]
    started = {int(pid): int(ticks) for pid, ticks in map(str.split, notes)}
    give_up = time.monotonic() + _END_SECONDS
    while time.monotonic() < give_up:
        alive = [pid for pid, ticks in started.items() if start_ticks(pid) == ticks]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    raise DemoError(f"processes {alive} of a killed job are still there after {_END_SECONDS:g} seconds")


def _log_lines(log: Path) -> list[dict[str, float]]:
    if not log.exists():
        return []
    # the last line may be half written, by a rank that is at it or was killed
    complete = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in complete]


def _read_log(log: Path, outcome: JobOutcome) -> None:
    for line in _log_lines(log):
        step = int(line["step"])
        outcome.losses[step] = line["loss"]
        outcome.looks[step] = line["looks"]  # type: ignore[assignment]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:])
