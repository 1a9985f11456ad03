"""Moved to `tests.support.manager_runs`; here until the tests of object stores import it from there."""

from tests.support.manager_runs import Recorder, state_at

__all__ = ["Recorder", "state_at"]
