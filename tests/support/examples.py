"""Numbers of hypothesis examples: fewer in `make test` than in `make test-all`, equal in each run."""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings, strategies

__all__ = ["choose_profile", "examples", "prepare_text"]

_QUICK_EXAMPLES: Final = 30
_ALL_EXAMPLES: Final = 100
_FEW: Final = 15


def choose_profile(*, is_quick: bool) -> None:
    """Before tests are collected. Other examples are tried with ``--hypothesis-profile=default``."""
    for name, count in (("quick", _QUICK_EXAMPLES), ("exhaustive", _ALL_EXAMPLES)):
        settings.register_profile(
            name,
            max_examples=count,
            derandomize=True,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("quick" if is_quick else "exhaustive")


def prepare_text() -> None:
    """The first strategy of text takes 200 MiB for a second, and leaves a file for all processes that follow:
    before there are workers, so that none of them does it on top of what it has."""
    strategies.text().validate()


def examples(
    count: int, *, quick: int | None = None, steps: int = 50, parent: settings | None = None
) -> settings:
    """``@examples(200)`` on a property, ``TestX.settings = examples(50, steps=30)`` for a state machine.

    That many in `make test-all`; in `make test` ``quick``, or three of ten, but 15 where there are as many.
    """
    if settings.get_current_profile_name() == "quick":
        fewer = max(min(count, _FEW), count * _QUICK_EXAMPLES // _ALL_EXAMPLES)
        count = fewer if quick is None else quick
    return settings(parent, max_examples=count, stateful_step_count=steps)
