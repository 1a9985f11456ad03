"""Processes of the demo: training jobs and commands, with bounded waits; all of them are ended."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dcp.demo.places import FolderPlace, Place
from dcp.watching import start_ticks

__all__ = ["DemoError", "JobOutcome", "Workplace", "environ_of"]

_RANKS = "dcp.demo.ranks"
"""Imported on use, because it imports torch, which takes seconds, and which other commands do without."""
_CORPUS_CHARACTERS = 400_000
_JOB_SECONDS = 300.0
_COMMAND_SECONDS = 300.0
_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
_SHOWN_LOG_LINES = 40


class DemoError(Exception):
    """A job or command that the rest of the demo needs has failed."""


@dataclass
class JobOutcome:
    """Results of a training job: exit status, losses by step, each rank's passing looks by step."""

    exit_code: int | None
    seconds: float
    results: Path
    losses: dict[int, float]
    looks: dict[int, list[float]]

    def digests(self, name: str) -> dict[str, str]:
        """Read the digests noted as ``saved-STEP`` or ``loaded-STEP``; none if the job ended before."""
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

    def write_corpus(self) -> int:
        """Write the source of this package as the text to learn, and return its characters: a copy, so that
        every run of one demo reads the same."""
        package = Path(__file__).parents[1]
        # the layers are links in a checkout, which rglob does not follow before Python 3.13
        folders = (package, package / "planners", package / "storage")
        sources = {path.resolve() for folder in folders for path in folder.rglob("*.py") if path.is_file()}
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(sources))
        data = text.encode("ascii", errors="ignore")[:_CORPUS_CHARACTERS]
        self.corpus.write_bytes(data)
        return len(data)

    def train(
        self,
        name: str,
        ranks: int,
        *,
        checkpoints: str,
        writer: str = "thread",
        stop: tuple[int, str] | None = None,
        on_step: Callable[[int, float], None],
    ) -> JobOutcome:
        """Run one training job, started as by torchrun, to its end; or kill it where all ranks ``stop``.

        It resumes from the newest good checkpoint of its folder, and saves behind the training loop, in a
        thread or in a ``writer`` process by rank.

        Raises DemoError, with the end of the job's log, if it fails or takes longer than five minutes.
        """
        training = importlib.import_module(_RANKS)
        results = self.root / "results" / name
        results.mkdir(parents=True)
        log = self.root / "logs" / f"{name}.txt"
        log.parent.mkdir(exist_ok=True)
        where = self.place.root(checkpoints)
        job = training.TrainingJob(self.corpus, where, results, self.steps, self.save_every, writer, stop)
        begun = time.monotonic()
        details = (job, ranks, environ_of(self.place.environment), log)
        process = multiprocessing.get_context("fork").Process(target=training.launch, args=details)
        process.start()
        try:
            _await(process, results, ranks, on_step)
        finally:
            _end(process, results)
        if process.exitcode != 0 and stop is None:
            raise DemoError(f"the job {name!r} failed with exit code {process.exitcode}:\n{_tail(log)}")
        lines = {int(line["step"]): line for line in _log_lines(results)}
        losses, looks = ({step: line[key] for step, line in lines.items()} for key in ("loss", "looks"))
        return JobOutcome(process.exitcode, time.monotonic() - begun, results, losses, looks)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run ``python ARGUMENTS`` where relative checkpoints are; give its exit status and what it printed.

        Raises DemoError after five minutes.
        """
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=self.place.folder if isinstance(self.place, FolderPlace) else self.root,
                env=environ_of(self.place.environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{' '.join(arguments)} took longer than {_COMMAND_SECONDS:g} seconds") from error
        return done.returncode, done.stdout


def environ_of(extra: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a process: without what another launcher may have set in this one's."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("TORCHELASTIC_", "PET_"))
    }
    # One thread a rank: two cores, and sums whose order does not depend on the machine's.
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    given = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part]
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *given])
    if Path("/sys/class/net/lo").exists():
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept | dict(extra)


def _await(process: BaseProcess, results: Path, ranks: int, on_step: Callable[[int, float], None]) -> None:
    """Wait until the job has ended, or all of its ranks have stopped to be killed."""
    give_up = time.monotonic() + _JOB_SECONDS
    while process.exitcode is None and len([*results.glob("stopped-*")]) < ranks:
        process.join(_POLL_SECONDS)
        if lines := _log_lines(results):
            on_step(int(lines[-1]["step"]), lines[-1]["loss"])
        if time.monotonic() > give_up:
            raise DemoError(f"a job did not end within {_JOB_SECONDS:g} seconds: {results.name}")


def _end(process: BaseProcess, results: Path) -> None:
    """Kill the launcher, then the ranks: no process of the job outlives it, but for writer processes."""
    process.kill()
    process.join()
    notes = [note.read_text() for note in results.glob("rank-*.pid")]
    started = {int(pid): int(ticks) for pid, ticks in map(str.split, notes)}
    give_up = time.monotonic() + _END_SECONDS
    while alive := [pid for pid, ticks in started.items() if start_ticks(pid) == ticks]:
        if time.monotonic() > give_up:
            raise DemoError(
                f"processes {alive} of a killed job are still there after {_END_SECONDS:g} seconds"
            )
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _log_lines(results: Path) -> list[dict[str, Any]]:
    log = results / "losses.jsonl"
    text = log.read_text() if log.exists() else ""
    # the last line may be half written, by a rank that is at it or was killed
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:])
