"""Job kinds for tests: their tasks write, wait, fail, take memory, or die. Each job works in one folder.

Each act adds a line to ``log`` in that folder, so that a test can count the acts in spite of kills.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import Field
from sqlalchemy import Connection, insert

from dcp.server.core.jobs.kind import (
    JobContext,
    JobPlan,
    Kind,
    Parameters,
    PermanentJobError,
    ReportProgress,
    TaskSpec,
    TransientJobError,
)
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.database.tables import audit
from dcp.server.records.jobs import Job

__all__ = ["KINDS", "NO_KINDS", "TEST_KINDS", "log_lines", "note"]

TEST_KINDS: Final = "tests.support.job_kinds:KINDS"


def note(folder: str | Path, line: str) -> None:
    """Append a line to the log atomically, with concurrent writers."""
    fd = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


def log_lines(folder: Path) -> list[str]:
    """Return the lines of the log."""
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


class MadeParams(Parameters):
    """Parameters with an act for each task in ``acts``; see `_act`."""

    folder: str
    acts: list[str] = Field(default_factory=list)
    plan_act: str = "write"
    publish_act: str = "write"
    payload_bytes: int = 0


class MadeKind(Kind[MadeParams]):
    """A kind whose tasks act; publishing joins the written parts in ``target``, once."""

    name: ClassVar[str] = "made"
    scope: ClassVar[Scope] = "write"
    params = MadeParams

    def specify(
        self, connection: Connection, params: MadeParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """Accept any request."""
        return JobSpec(kind=self.name, params=params.model_dump(), created_by=caller.name)

    def prepare(self, connection: Connection, params: MadeParams) -> Json:
        """Return data for `plan`."""
        return {"prepared": len(params.acts)}

    def plan(self, context: JobContext, params: MadeParams) -> JobPlan:
        """Plan one task for each act."""
        note(params.folder, f"plan {context.prepared['prepared']}")
        _act(params.plan_act, context, Path(params.folder), lambda done_bytes: None)
        filling = {"filling": "x" * params.payload_bytes} if params.payload_bytes else {}
        specs = [
            TaskSpec(
                payload={"folder": params.folder, "act": act, "number": number, **filling}, weight_bytes=100
            )
            for number, act in enumerate(params.acts)
        ]
        return JobPlan(tasks=specs, plan_data={"folder": params.folder, "act": params.publish_act})

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """Run the act."""
        folder = Path(payload["folder"])
        note(folder, f"task {payload['number']} {os.getpid()}")
        assert not context.settings.features and context.settings.webhook_key is None, "they are of others"
        _act(payload["act"], context, folder, report_progress)
        (folder / f"part-{payload['number']}").write_text(payload["act"])
        note(folder, f"done {payload['number']}")
        return {"number": payload["number"], "roots": sorted(context.settings.roots)}

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """Join all parts in one file, which appears complete and only once."""
        folder = Path(plan_data["folder"])
        note(folder, f"publish {os.getpid()}")
        if plan_data["act"] != "die_after":
            _act(plan_data["act"], context, folder, lambda done_bytes: None)
        text = "\n".join(f"{result['number']}" for result in results)
        aside = context.work_folder / "aside"
        aside.write_text(text)
        try:
            os.link(aside, folder / "target")
            note(folder, "published")
        except FileExistsError:
            note(folder, "was published")
        if plan_data["act"] == "die_after":
            _act("die_once", context, folder, lambda done_bytes: None)
        return {"parts": len(results), "text": (folder / "target").read_text()}

    def discard(self, context: JobContext, plan_data: Json) -> None:
        """Remove the parts."""
        folder = Path(plan_data["folder"])
        for part in folder.glob("part-*"):
            part.unlink()
        note(folder, "discard")

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Add an entry to the audit log."""
        row = {"at_seconds": time.time(), "actor": "test", "action": "made", "target": f"job {job.id}"}
        connection.execute(insert(audit).values(**row, detail=dict(result)))


def _act(act: str, context: JobContext, folder: Path, report: ReportProgress) -> None:
    name, _, argument = act.partition(":")
    if name == "sleep":
        _sleep(float(argument), report)
    elif name == "wait":
        while not (folder / argument).exists():
            time.sleep(0.01)
    elif name == "hold":  # keeps the interpreter's lock and blocks all signals except SIGKILL
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        end = time.monotonic() + float(argument)
        while time.monotonic() < end:
            sum(range(1000))
    elif name == "take":
        _take(int(argument))
    elif name == "grab":  # in one allocation
        _take(1, int(argument))
    elif name == "die_once":
        if _is_first(folder, f"died-{context.task_number}"):
            os.kill(os.getpid(), signal.SIGKILL)
    elif name == "fail_once":
        if _is_first(folder, f"failed-{context.task_number}"):
            raise TransientJobError("not this time")
    elif name == "fail":
        raise PermanentJobError("never \udc80")
    elif name == "exit":
        sys.exit(3)
    elif name == "secret":
        raise FileNotFoundError(2, "there is none", "https://user:SECRET@host/")
    elif name == "keep":  # a file in the work folder
        (context.work_folder / "kept").write_bytes(bytes(1000))
        note(folder, f"work {context.work_folder}")


def _sleep(seconds: float, report: ReportProgress) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        report(int(100 * (1 - left / seconds)))
        time.sleep(0.02)


def _take(count: int, mebibytes: int = 1) -> None:
    taken = [b"\1" * (mebibytes << 20) for _ in range(count)]
    threading.Event().wait(5)
    del taken


def _is_first(folder: Path, name: str) -> bool:
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class BriefKind(MadeKind):
    """A made job with a slot of its own, like scans."""

    name: ClassVar[str] = "brief"
    has_own_slot: ClassVar[bool] = True


KINDS: Final = {"made": MadeKind(), "brief": BriefKind()}

NO_KINDS: Final[dict[str, MadeKind]] = {}
"""The kinds of a worker that is too old for all others."""
