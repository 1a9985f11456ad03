"""SIGTERM as a manager notices it: one handler, any number of listeners, everything as before at the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from dcp.manager.coordination.signals import StopSignal
from tests.support.crashes import Child, in_lab


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Numbers of the signals that a handler of the user's own was called with."""
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield numbers
    signal.signal(signal.SIGTERM, before)


def send() -> None:
    """SIGTERM to this process; its handler has run when this returns."""
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigpending()


def test_all_listeners_and_the_handler_before_notice(heard: list[int]) -> None:
    """Two listeners are both told, the user's handler is called, and comes back when the last one leaves."""
    users = signal.getsignal(signal.SIGTERM)
    one, other = StopSignal(), StopSignal()
    assert one.listen()
    assert other.listen()
    send()
    assert (one.received, other.received, heard) == (True, True, [signal.SIGTERM])
    late = StopSignal()
    assert late.listen()
    one.close()
    other.close()
    assert signal.getsignal(signal.SIGTERM) is not users
    send()
    assert late.received
    late.close()
    late.close()
    assert signal.getsignal(signal.SIGTERM) is users
    assert heard == [signal.SIGTERM] * 2


def test_one_that_has_left_is_not_told(heard: list[int]) -> None:
    """A closed listener stays as it was while another still listens."""
    gone, there = StopSignal(), StopSignal()
    gone.listen()
    there.listen()
    gone.close()
    send()
    assert (gone.received, there.received) == (False, True)
    there.close()


def test_a_handler_that_came_on_top_is_left_alone(heard: list[int]) -> None:
    """Closing must not throw out what somebody installed later and may chain to ours."""
    stop = StopSignal()
    stop.listen()
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)

    def on_top(number: int, frame: FrameType | None) -> None:
        ours(number, frame)

    signal.signal(signal.SIGTERM, on_top)
    send()
    assert stop.received
    stop.close()
    assert signal.getsignal(signal.SIGTERM) is on_top
    send()
    assert heard == [signal.SIGTERM] * 2
    above = StopSignal()
    above.listen()
    send()
    assert above.received
    assert heard == [signal.SIGTERM] * 3
    above.close()
    assert signal.getsignal(signal.SIGTERM) is on_top


def test_other_threads_cannot_listen(caplog: pytest.LogCaptureFixture) -> None:
    """Python allows handlers in the main thread only: said in the log, and by False."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(StopSignal().listen()))
    thread.start()
    thread.join()
    assert answers == [False]
    assert "main thread" in caplog.text


def _sleep_on() -> None:
    """Until a signal ends this process. `signal.pause` would miss one that comes just before it: Python's
    handler runs between two calls, and the second one begins to wait."""
    while True:
        time.sleep(0.01)


def _forks() -> list[int]:
    """Exit signals of a fork that inherited the handler, and of a process whose listeners have left."""
    ready, done = os.pipe()
    stop = StopSignal()
    stop.listen()

    def wait_for_the_end() -> None:
        os.write(done, b"x")
        _sleep_on()

    inherited = Child(wait_for_the_end)
    os.read(ready, 1)
    os.kill(inherited.pid, signal.SIGTERM)
    endings = [inherited.wait(240).signal]

    def closed_under_another_handler() -> None:
        own = StopSignal()
        own.listen()
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        own.close()
        os.kill(os.getpid(), signal.SIGTERM)
        _sleep_on()

    stop.close()
    endings.append(Child(closed_under_another_handler).wait(240).signal)
    return endings


def test_forked_children_and_closed_managers_end_on_sigterm() -> None:
    """A data loader's worker must not live for ever because its parent's handler was there at the fork."""
    assert in_lab(_forks) == [signal.SIGTERM, signal.SIGTERM]
