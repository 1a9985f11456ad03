"""Numbers of hypothesis examples: fewer in `make test` than in `make test-all`, equal in each run."""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings, strategies

__all__ = ["choose_profile", "examples", "prepare_text"]

_QUICK_EXAMPLES: Final = 30
_ALL_EXAMPLES: Final = 100
_FEW: Final = 15


def choose_profile(*, is_quick: bool) -> None:
    """Load the profile before tests are collected. ``--hypothesis-profile=default`` draws other examples."""
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
    """Create hypothesis' character tables before workers start.

    The first text strategy takes 200 MiB for a second and leaves a file for later processes. Workers would
    need this memory on top of their own.
    """
    strategies.text().validate()


def examples(
    count: int, *, quick: int | None = None, steps: int = 50, parent: settings | None = None
) -> settings:
    """Return settings: ``@examples(200)`` on a property, ``TestX.settings = examples(50, steps=30)``
    elsewhere.

    `make test-all` runs ``count`` examples. `make test` runs ``quick``, by default 30 % of ``count``, but at
    least 15 (or all, if ``count`` is smaller).
    """
    if settings.get_current_profile_name() == "quick":
        fewer = max(min(count, _FEW), count * _QUICK_EXAMPLES // _ALL_EXAMPLES)
        count = fewer if quick is None else quick
    return settings(parent, max_examples=count, stateful_step_count=steps)
