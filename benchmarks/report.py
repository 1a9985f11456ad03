"""Results as a Markdown table and as JSON, with a description of the machine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.targets import Row, Spread

__all__ = ["environment", "markdown", "to_json"]

_HEAD = (
    "workload",
    "ranks",
    "operation",
    "GB",
    "dcphub",
    "stock",
    "stock, tuned; others",
    "ratio",
    "ratio, tuned; others",
    "limit",
    "of limit",
    "others' cores",
    "target: measured",
    "met",
)


def environment(folder: Path) -> dict[str, Any]:
    """Return the machine, versions and options of a run."""
    import torch

    from dcp.version import __version__

    device, kind = _mount(folder)
    return {
        "torch": str(torch.__version__),
        "dcphub": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "filesystem": kind,
        "device": device,
        "load_average": os.getloadavg(),
    }


def _first(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _mount(folder: Path) -> tuple[str, str]:
    """Return device and file system type of the mount of ``folder``."""
    best, found = "", ("unknown", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        if folder.resolve().is_relative_to(point) and len(point) > len(best):
            best, found = point, (device, kind)
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def _seconds(spread: Spread | None) -> str:
    if spread is None or math.isnan(spread.median):
        return ""
    return f"{spread.median:.3f} s ({spread.smallest:.3f}-{spread.largest:.3f})"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.1f}x ({spread.smallest:.1f}-{spread.largest:.1f})"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in map(str.strip, parts) if part)


def _cells(row: Row) -> list[str]:
    ours, stock = _seconds(row.ours), _seconds(row.stock)
    if row.mebibytes is not None:
        ours, stock = f"{row.mebibytes:.0f} MiB", f"{row.stock_mebibytes:.0f} MiB"
    if row.read_per_needed is not None:
        ours += f", reads {row.read_per_needed:.2f}"
        if row.stock_read_per_needed is not None:
            stock += f", reads {row.stock_read_per_needed:.2f}"
    if row.cpu_seconds is not None:
        ours += f", {row.cpu_seconds:.2f} s of processor time"
        stock += f", {row.stock_cpu_seconds:.2f} s of processor time"
    if row.percentile_90 is not None:
        ours += f", p90 {row.percentile_90:.3f} s"
        stock += f", p90 {row.stock_percentile_90:.3f} s"
    if row.lost is not None:
        ours += f", loses {row.lost:.1%}, {_seconds(row.cost)} per save"
        stock += f", loses {row.stock_lost:.1%}, {_seconds(row.stock_cost)} per save"
    return [
        row.workload,
        str(row.ranks),
        row.operation,
        f"{row.gigabytes:.2f}",
        ours,
        stock,
        _joined(_seconds(row.stock_tuned), f"{row.peer_name} {_seconds(row.peer)}"),
        _ratio(row.ratio),
        _joined(_ratio(row.ratio_tuned), f"{row.peer_name} {_ratio(row.ratio_peer)}"),
        f"{row.limit_name} {_seconds(row.limit)}".strip(),
        "" if row.of_limit is None else f"{row.of_limit:.0%}",
        "" if row.others is None else f"{row.others:.1f}",
        "; ".join(f"{verdict.text}: {_value(verdict.text, verdict.value)}" for verdict in row.verdicts),
        "" if not row.verdicts else "yes" if all(verdict.met for verdict in row.verdicts) else "no",
    ]


def _value(text: str, value: float) -> str:
    return f"{value:.0%}" if "%" in text else f"{value:.3g}"


def markdown(rows: Sequence[Row], facts: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the machine, the options and the table; seconds are median (smallest-largest) of the rounds."""
    lines = [
        "# Benchmarks",
        "",
        "Seconds: median (smallest-largest) of the rounds. Ratios: stock (other) / dcphub, within a round.",
        "",
        *(f"- {name}: {value}" for name, value in {**facts, **options}.items()),
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|" + "---|" * len(_HEAD),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def to_json(
    rows: Sequence[Row], facts: dict[str, Any], options: dict[str, Any], measured: Sequence[Any]
) -> str:
    """Return everything, including every sample. Missing figures are null."""
    document = {
        "environment": facts,
        "options": options,
        "rows": [dataclasses.asdict(row) for row in rows],
        "measurements": [dataclasses.asdict(item) for item in measured],
    }
    return json.dumps(_without_nan(document), indent=1, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
