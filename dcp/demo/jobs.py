"""Starting training jobs and commands as processes, with bounded waits, and ending all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dcp.demo.places import FolderPlace, Place

__all__ = ["DemoError", "JobOutcome", "Workplace", "environ_of", "import_path"]

JOB_VARIABLE = "DCP_DEMO_JOB"
"""Marks the processes of a job, so that none but them is ever killed."""

_JOB_SECONDS = 300.0
_COMMAND_SECONDS = 120.0
_POLL_SECONDS = 0.1
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
        """Run one training job under torchrun to its end, or its death if ``kill_at`` is given.

        It goes on from the newest good checkpoint of its folder, and saves behind the training loop, in a
        thread or in a ``writer`` process by rank.

        Raises DemoError, with the end of the job's log, if it fails or takes longer than five minutes.
        """
        results = self.root / "results" / name
        results.mkdir(parents=True)
        tag = uuid.uuid4().hex
        extra = {**self.place.environment, JOB_VARIABLE: tag} | (
            {"DCP_DEMO_KILL_AT": kill_at} if kill_at else {}
        )
        log = self.root / "logs" / f"{name}.txt"
        log.parent.mkdir(exist_ok=True)
        begun = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._torchrun(name, ranks, results, checkpoints, writer),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environ_of(extra),
            )
            try:
                exit_code = _await(process, results / "losses.jsonl", on_step)
            finally:
                _end(process, results, tag)
        outcome = JobOutcome(name, exit_code, time.monotonic() - begun, results)
        _read_log(results / "losses.jsonl", outcome)
        if exit_code != 0 and not kill_at:
            raise DemoError(f"the job {name!r} failed with exit code {exit_code}:\n{_tail(log)}")
        return outcome

    def _torchrun(self, name: str, ranks: int, results: Path, checkpoints: str, writer: str) -> list[str]:
        arguments = {
            "--corpus": self.corpus,
            "--checkpoints": self.place.root(checkpoints),
            "--results": results,
            "--steps": self.steps,
            "--save-every": self.save_every,
            "--writer": writer,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        # its default would stay behind in the folder for temporary files
        command += [f"--log-dir={self.root / 'logs' / name}"]
        command += [f"--nproc-per-node={ranks}", "-m", "dcp.demo.training.train"]
        return command + [str(part) for pair in arguments.items() for part in pair]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m ARGUMENTS`` where relative checkpoints are; DemoError after two minutes."""
        folder = self.place.folder if isinstance(self.place, FolderPlace) else self.root
        try:
            return subprocess.run(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                # a package that is only importable from the current folder must be so from there, too
                env=environ_of({**self.place.environment, "PYTHONPATH": os.pathsep.join(import_path())}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{' '.join(arguments)} took longer than {_COMMAND_SECONDS:g} seconds") from error


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


def _await(process: subprocess.Popen[bytes], log: Path, on_step: Callable[[int, float], None]) -> int:
    give_up = time.monotonic() + _JOB_SECONDS
    shown = 0
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        lines = _log_lines(log)
        if lines and lines[-1]["step"] != shown:
            shown = int(lines[-1]["step"])
            on_step(shown, lines[-1]["loss"])
        if time.monotonic() > give_up:
            raise DemoError(f"a job did not end within {_JOB_SECONDS:g} seconds: {log.parent.name}")


def _end(process: subprocess.Popen[bytes], results: Path, tag: str) -> None:
    """No process of the job outlives it: launcher first, then the ranks, which note their numbers."""
    if process.poll() is None:
        process.kill()
        process.wait()
    ranks = [int(path.read_text()) for path in results.glob("rank-*.pid")]
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        alive = [pid for pid in ranks if _belongs_to_job(pid, tag)]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    raise DemoError(f"processes {ranks} of a killed job are still there after 20 seconds")


def _belongs_to_job(pid: int, tag: str) -> bool:
    """Whether ``pid`` is alive and still the process that was started: numbers are used again."""
    try:
        return f"{JOB_VARIABLE}={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False


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
