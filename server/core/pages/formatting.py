"""Formatting of sizes, counts, times and durations. All functions return text; templates escape it."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup

from dcp.server.catalog.inputs import short_name

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES: Final = ((60, "s"), (3600, "min"), (86_400, "h"), (30 * 86_400, "d"), (365 * 86_400, "mo"))
_UNKNOWN: Final = "\N{EN DASH}"
_TURNING: Final = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_TIMES: Final = " \N{MULTIPLICATION SIGN} "


def visible(value: Any) -> Any:
    r"""Return text with bidirectional control characters escaped (``\u202e``), so no name can imitate
    another.

    Markup stays unchanged: ``|e`` preserves a value that a form sends back.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or not _TURNING.search(value):
        return value
    return _TURNING.sub(lambda match: f"\\u{ord(match.group()):04x}", value)


def bytes_text(size: float | None) -> str:
    """Format bytes as ``1.25 GiB``: three digits, in powers of 1024."""
    if size is None:
        return _UNKNOWN
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount /= 1024
        unit += 1
    return f"{size:,} B" if unit == 0 else f"{_three(amount)} {_UNITS[unit]}"


def _three(amount: float) -> str:
    return f"{amount:.0f}" if amount >= 99.95 else f"{amount:.1f}" if amount >= 9.995 else f"{amount:.2f}"


def count_text(count: float | None) -> str:
    """Format a count as ``12,345``."""
    return _UNKNOWN if count is None else f"{count:,}"


def large_text(count: float | None) -> str:
    """Format a number of elements as ``6.74 B``, in powers of 1000."""
    if count is None:
        return _UNKNOWN
    amount = float(count)
    for unit in ("", "K", "M", "B"):
        if amount < 999.5:
            return f"{amount:.0f}" if not unit else f"{_three(amount)} {unit}"
        amount /= 1000
    return f"{_three(amount)} T"


def number_text(value: float | None) -> str:
    """Format a metric with five significant digits."""
    if value is None:
        return _UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else edge_text(value)
    return f"{value:.5g}"


def metrics_of(one: Any) -> dict[str, float]:
    """Return all metrics of a checkpoint by name, including NaN and infinite ones."""
    odd = {name: float(text) for name, text in one.nonfinite_metrics.items()}
    return dict(sorted({**one.metrics, **odd}.items()))


def edge_text(value: float) -> str:
    """Format the edge of a bin with two significant digits; powers of two stay exact."""
    if math.isinf(value):
        return "-\N{INFINITY}" if value < 0 else "\N{INFINITY}"
    return (
        f"{value:.0f}"
        if 1 <= abs(value) < 10_000
        else f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    )


Moment = datetime | str
"""A UTC time, or its API form."""


def time_text(moment: Moment | None) -> str:
    """Format a time as ``2026-01-31 12:00:00 UTC``."""
    text = moment.isoformat() if isinstance(moment, datetime) else moment
    return _UNKNOWN if text is None else f"{text[:10]} {text[11:19]} UTC"


def ago_text(moment: Moment | None, now_seconds: float) -> str:
    """Format an age as ``3 h ago``."""
    if moment is None:
        return "never"
    seconds = now_seconds - _seconds_of(moment)
    if abs(seconds) < 10:
        return "just now"
    return f"{_span(seconds)} ago" if seconds >= 0 else f"in {_span(-seconds)}"


def _span(seconds: float) -> str:
    unit_seconds = 1
    for end, unit in _AGES:
        if seconds < end:
            return f"{seconds / unit_seconds:.0f} {unit}"
        unit_seconds = end
    return f"{seconds / unit_seconds:.1f} y"


def _seconds_of(moment: Moment) -> float:
    found = moment if isinstance(moment, datetime) else datetime.fromisoformat(moment)
    return found.astimezone(UTC).timestamp()


def seconds_text(seconds: float | None) -> str:
    """Format a duration as ``1 h 02 min``, ``3.2 s`` or ``40 ms``."""
    if seconds is None:
        return _UNKNOWN
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "< 1 ms"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"


def between_text(start: Moment | None, end: Moment | None) -> str:
    """Format the duration between two times."""
    if start is None or end is None:
        return _UNKNOWN
    return seconds_text(max(0.0, _seconds_of(end) - _seconds_of(start)))


def shape_text(shape: list[int] | None) -> str:
    """Format a shape as lengths separated by a sign, or as scalar."""
    if shape is None:
        return _UNKNOWN
    return _TIMES.join(map(str, shape)) if shape else "scalar"


def box_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Format a box as slices, ``0:512, 128:256``; empty for a scalar."""
    return ", ".join(f"{begin}:{begin + size}" for begin, size in zip(offsets, sizes, strict=True))


def times_text(ratio: float) -> str:
    """Format a ratio as ``1.8``."""
    return f"{ratio:.2f}" if ratio < 1.095 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


def glob_below_text(name: str) -> str:
    """Return a glob of all names below a name with any characters."""
    return f"{glob.escape(name)}.*"


def json_text(value: Any) -> str:
    """Format indented JSON without escapes; the template escapes it."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def share_text(share: float) -> str:
    """Format a share as ``0.012 %`` with two significant digits, so rare values do not become 0."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.0f} %" if percent >= 9.5 or not percent else f"{percent:.2g} %"


def percent_text(share: float) -> str:
    """Format a share as ``12 %``."""
    return f"{100 * share:.0f} %"


FILTERS: Final[dict[str, Any]] = {
    "ago": ago_text,
    "between": between_text,
    "box": box_text,
    "bytes": bytes_text,
    "count": count_text,
    "edge": edge_text,
    "glob_below": glob_below_text,
    "is_finite": math.isfinite,
    "json": json_text,
    "large": large_text,
    "metrics": metrics_of,
    "number": number_text,
    "percent": percent_text,
    "seconds": seconds_text,
    "shape": shape_text,
    "share": share_text,
    "short": short_name,
    "time": time_text,
    "times": times_text,
    "visible": visible,
}
"""Filters of the templates."""
