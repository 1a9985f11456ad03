"""What the demo claims, whether it held, and how losses are shown and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Checks", "compare_digests", "largest_difference", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_BARS_WIDTH = 40


@dataclass
class Checks:
    """Claims in the order they were made, each with whether it held and the reason if not."""

    results: list[tuple[str, bool, str]] = field(default_factory=list)

    def add(self, claim: str, held: bool, reason: str = "") -> bool:
        """Note a claim; ``reason`` says what was seen instead where it did not hold."""
        self.results.append((claim, held, "" if held else reason))
        return held

    @property
    def failed(self) -> list[tuple[str, str]]:
        """Claims that did not hold, with the reason."""
        return [(claim, reason) for claim, held, reason in self.results if not held]


def compare_digests(wanted: Mapping[str, str], got: Mapping[str, str], *, without: str = "") -> str:
    """What differs between two sets of digests, in words; empty if nothing does.

    Names that begin with ``without`` are left out. No digests at all count as a difference, because then
    nothing was compared.
    """

    def kept(digests: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in digests.items() if not (without and name.startswith(without))}

    left, right = kept(wanted), kept(got)
    if not left:
        return "there are no digests to compare with"
    differing = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    if not differing:
        return ""
    return f"{len(differing)} of {len(left)} entries differ, such as {', '.join(differing[:3])}"


def largest_difference(reference: Mapping[int, Any], other: Mapping[int, Any], steps: Sequence[int]) -> float:
    """The largest absolute difference of two logs over ``steps``; infinite if either lacks one of them."""
    if not steps or any(step not in reference or step not in other for step in steps):
        return float("inf")
    pairs = [(_numbers(reference[step]), _numbers(other[step])) for step in steps]
    if any(len(left) != len(right) for left, right in pairs):
        return float("inf")
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))


def _numbers(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def sparkline(losses: Mapping[int, float], steps: range, low: float, high: float) -> str:
    """At most 40 characters, a step or more each, higher for a higher loss; blank where the run has none."""

    def bar(step: int) -> str:
        if step not in losses:
            return " "
        height = (losses[step] - low) / max(high - low, 1e-9)
        return _BARS[min(len(_BARS) - 1, max(0, int(height * len(_BARS))))]

    return "".join(bar(step) for step in steps[:: -(-len(steps) // _BARS_WIDTH)])
