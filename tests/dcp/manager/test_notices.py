"""Notices that a machine goes away: signals and files, what each leaves of the time, and what is none."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import OptionError
from dcp.manager.coordination.notices import Notices, grace_of


def becomes(condition: Callable[[], bool]) -> bool:
    """Whether it is so within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def notices(grace: Any) -> Notices:
    """Those of a manager that was given ``grace``."""
    return Notices(*grace_of(grace, handle_sigterm=True))


def test_each_signal_has_its_time() -> None:
    """The end is the earliest by all that came, a tenth of its time before that, counted from the first of a
    kind; without a known time there is none."""
    found = notices({signal.SIGUSR1: 100, signal.SIGUSR2: 20})
    assert (found.received, found.seconds_left(), found.has_grace) == (False, math.inf, True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (found.received, found.seconds_left()) == (True, math.inf)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert 50 < found.seconds_left() <= 95
    os.kill(os.getpid(), signal.SIGUSR2)
    left = found.seconds_left()
    assert 1 < left <= 18
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert found.seconds_left() < left - 0.04
    found.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    without = notices(None)
    assert not without.has_grace
    without.close()


def test_a_file_that_appears_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and whatever the clock says; one that is there already is none before it comes anew;
    and when the time is over saves are called off, again and again."""
    there, coming = tmp_path / "there", tmp_path / "coming"
    there.touch()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr("dcp.manager.coordination.notices._LOOK_SECONDS", 0.02)
    found = notices({str(there): 50, coming: 0.5})
    calls: list[float] = []
    found.see_to_it(lambda: calls.append(time.monotonic()))
    time.sleep(0.1)
    assert (found.received, calls) == (False, [])
    there.unlink()
    time.sleep(0.1)
    there.touch()
    assert becomes(lambda: found.received)
    assert 5 < found.seconds_left() < 45
    coming.mkdir()
    assert becomes(lambda: len(calls) > 2)
    found.close()
    found.close()
    count = len(calls)
    time.sleep(0.1)
    assert len(calls) <= count + 1


@pytest.mark.parametrize(
    ("grace", "word"),
    [
        (0, "above 0"),
        (-1, "above 0"),
        (math.inf, "above 0"),
        (math.nan, "above 0"),
        ("30", "above 0"),
        (True, "above 0"),
        ({signal.SIGKILL: 3}, "SIGKILL"),
        ({4711: 3}, "no signal"),
        ({None: 3}, "neither"),
        ({b"/x": 3}, "neither"),
        ({"": 3}, "no path"),
        ({"/": 3}, "no path"),
        ({"/x": "soon"}, "above 0"),
    ],
)
def test_what_is_no_notice_is_refused(grace: Any, word: str) -> None:
    """By an OptionError that says what it is."""
    with pytest.raises(OptionError, match=word):
        grace_of(grace, handle_sigterm=True)


def test_sigterm_that_is_not_handled_has_no_time() -> None:
    """Both at once cannot be meant."""
    with pytest.raises(OptionError, match="handle_sigterm"):
        grace_of(30, handle_sigterm=False)
    assert grace_of({signal.SIGUSR1: 5}, handle_sigterm=False) == ({signal.SIGUSR1: 5}, {})
