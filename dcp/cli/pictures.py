"""Numbers as pictures made of characters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["bar", "can_print", "sparkline"]

_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
_WIDTHS: Final = " ▏▎▍▌▋▊▉█"
_ASCII_HEIGHTS: Final = " .:-=+*%#"


def sparkline(counts: Sequence[int]) -> str:
    """One character for each of ``counts``, as high as it is; whatever is not 0 can be seen."""
    heights = _HEIGHTS if can_print(_HEIGHTS) else _ASCII_HEIGHTS
    largest = max(counts, default=0)
    return "".join(heights[-(-count * 8 // largest) if largest else 0] for count in counts)


def bar(count: int, largest: int, width: int) -> str:
    """A bar of ``width`` characters for ``largest``, and of its share for ``count``."""
    eighths = -(-count * width * 8 // largest) if largest else 0
    if not can_print(_WIDTHS):
        return "#" * -(-eighths // 8)
    return ("█" * (eighths // 8) + _WIDTHS[eighths % 8]).rstrip()


def can_print(text: str) -> bool:
    """Return whether standard output can show these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
