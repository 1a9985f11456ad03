"""A plugin that tells what the tests cost: ``pytest -p tests.support.cpu_seconds`` has a table of the dearest
files and tests, in CPU seconds of the test process and of all processes below it.

Wall-clock time says little where several workers share the cores.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from pytest import Config, Item, TerminalReporter, TestReport

_ROWS: Final = 40
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")

_tests_seconds: dict[str, float] = defaultdict(float)
_tests_waited: dict[str, float] = defaultdict(float)
_spent = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Item) -> Generator[None, TestReport, TestReport]:
    """At the end of a test: what was spent since the end of the one before."""
    global _spent
    report = yield
    if report.when == "teardown":
        before, _spent = _spent, _spent_by_tree()
        report.user_properties.append(("cpu_seconds", _spent - before))
    return report


def pytest_runtest_logreport(report: TestReport) -> None:
    """Added up here, where the reports of all workers come."""
    _tests_waited[report.nodeid] += report.duration
    if report.when == "teardown":
        _tests_seconds[report.nodeid] += float(str(dict(report.user_properties).get("cpu_seconds", 0.0)))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: Config) -> None:
    """The tables."""
    files_seconds: dict[str, float] = defaultdict(float)
    files_waited: dict[str, float] = defaultdict(float)
    for name, seconds in _tests_seconds.items():
        files_seconds[name.partition("::")[0]] += seconds
        files_waited[name.partition("::")[0]] += _tests_waited[name]
    terminalreporter.section(f"CPU seconds: {sum(files_seconds.values()):.1f} in all; by file and test")
    for by_name in ((files_seconds, files_waited), (_tests_seconds, _tests_waited)):
        for line in _rows(*by_name):
            terminalreporter.write_line(line)


def _rows(seconds: Mapping[str, float], waited: Mapping[str, float]) -> Iterator[str]:
    yield "   CPU s  wall s"
    for name in sorted(seconds, key=lambda name: -seconds[name])[:_ROWS]:
        yield f"{seconds[name]:8.2f}{waited[name]:8.2f}  {name}"


def _spent_by_tree() -> float:
    """CPU seconds of this process and of those below it, with what they waited for."""
    spent: dict[int, int] = {}
    below: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(stat.parent.name)
        below[int(words[1])].append(pid)
        spent[pid] = sum(map(int, words[11:15]))
    ticks, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        ticks += spent.get(pid, 0)
        todo += below[pid]
    return ticks / _TICKS_PER_SECOND
