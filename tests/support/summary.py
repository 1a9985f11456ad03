"""A plugin that ends a run with commands to repeat failed tests, and the memory of the run."""

from __future__ import annotations

import re
import resource
import shlex
from typing import Any, Final

import pytest

__all__ = ["MOST_MEMORY"]

MOST_MEMORY: Final = "most memory of a process of tests"
"""Label of the memory in MiB in the summary; `.ci/run` reads it."""

_BLOB: Final = re.compile(r"@reproduce_failure\(.*\)")

_peaks: Final[list[int]] = []


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's peak memory to the process that writes the summary."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["peak_mib"] = _peak_mib()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Record the peak of an ended worker; a crashed worker sends none."""
    _peaks.append(getattr(node, "workeroutput", {}).get("peak_mib", 0))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write a line for each failure, and a line of memory."""
    reports = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if reports:
        terminalreporter.section("run again")
    for name, text in {report.nodeid: report.longreprtext for report in reports}.items():
        blob = _BLOB.search(text)
        example = f"  # with {blob[0]}" if blob else ""
        terminalreporter.write_line(f".venv/bin/python -m pytest -n0 {shlex.quote(name)}{example}")
    terminalreporter.write_line(f"{MOST_MEMORY}: {max([_peak_mib(), *_peaks])} MiB")
