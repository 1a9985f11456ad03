"""What a scan did not find: what of it is believed to be gone, and what needs a person's word.

A disk that is not mounted, another folder in the place of the root or of a part of it, a mistyped address:
all of these look like checkpoints that somebody has deleted. So a root that has lost much at once is believed
only when a person says so. Trainers that keep their last few steps lose nothing here: as many come as go.

Pure: nothing is read or written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Doubt", "Losses", "Missing", "judge"]

_MANY: Final = 10
_SHARE: Final = 0.2
"""Of all that is known of a root. Fewer are what cleaning up by hand, and retention, take away."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The ``names`` that are known of a run and were not found, of ``known`` ones that were there; ``found``
    is how many are there now, new ones too."""

    run: str
    names: tuple[str, ...]
    known: int
    found: int

    @property
    def lost(self) -> int:
        """By how many the run is smaller."""
        return min(len(self.names), max(0, self.known - self.found))

    @property
    def keys(self) -> list[str]:
        """Relative to the root."""
        return [f"{self.run}/{name}" if self.run else name for name in self.names]


@dataclass(frozen=True, slots=True)
class Losses:
    """``gone`` is to be marked as vanished, ``doubted`` stays as it is. ``is_other_place``: nothing was found
    of what was known when the doubt began."""

    gone: Sequence[Missing]
    doubted: Sequence[Missing] = ()
    is_other_place: bool = False

    @property
    def count(self) -> int:
        """Of checkpoints that are doubted to be gone."""
        return sum(len(each.names) for each in self.doubted)


@dataclass(frozen=True, slots=True)
class Doubt:
    """What the scan before this one did not believe, and nobody has accepted since: losses of these runs."""

    runs: frozenset[str] = frozenset()
    is_other_place: bool = False


def judge(missing: Sequence[Missing], known: int, *, accepted: int = 0, before: Doubt = Doubt()) -> Losses:
    """Which of ``missing`` are believed, of a root that had ``known`` checkpoints in all.

    All is, where a person has said that up to ``accepted`` are gone. As long as runs are smaller whose loss
    was doubted ``before``, it is doubted, so that it does not come to be a small share while the root grows;
    and no other loss is believed meanwhile.
    """
    smaller = [each for each in missing if each.lost]
    lost = sum(each.lost for each in smaller)
    is_all = 0 < lost == known
    lasts = any(each.run in before.runs for each in smaller)
    is_too_much = is_all or lasts or (lost >= _MANY and lost > _SHARE * known)
    doubted = Losses(
        [each for each in missing if not each.lost], smaller, is_all or (lasts and before.is_other_place)
    )
    return doubted if is_too_much and doubted.count > accepted else Losses(missing)
