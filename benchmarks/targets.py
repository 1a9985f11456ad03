"""What the project promised itself, and the rows of the table that say how far it got."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.resharding import Resharding
from benchmarks.rounds import Measurement

__all__ = ["Row", "Spread", "Target", "Verdict", "memory_row", "reshard_row", "save_load_row"]

Kind = Literal["ratio", "ratio_2_threads", "of_limit", "microseconds", "read_per_needed", "mebibytes"]

_AT_MOST = ("microseconds", "read_per_needed", "mebibytes")


@dataclass(frozen=True)
class Target:
    """A bound for one figure of a row; at least, or at most for costs."""

    kind: Kind
    bound: float


@dataclass(frozen=True)
class Verdict:
    """A target with the figure that was measured."""

    text: str
    value: float
    met: bool


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the rounds."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of the samples of one contender."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Row:
    """One line of the table. Times in seconds; ratios above 1 mean that ours is faster.

    ``others`` is the median of the cores that other processes kept busy: above 0.2 or so, measure again.
    """

    workload: str
    ranks: int
    operation: str
    gigabytes: float
    ours: Spread
    stock: Spread | None = None
    stock_2_threads: Spread | None = None
    ratio: Spread | None = None
    ratio_2_threads: Spread | None = None
    limit_name: str = ""
    limit: Spread | None = None
    of_limit: float | None = None
    microseconds: float | None = None
    read_per_needed: float | None = None
    stock_read_per_needed: float | None = None
    mebibytes: float | None = None
    others: float | None = None
    stock_mebibytes: float | None = None
    verdicts: tuple[Verdict, ...] = ()

    def judge(self, targets: Sequence[Target]) -> Row:
        """Fill in the verdicts."""
        self.verdicts = tuple(self._verdict(target) for target in targets)
        return self

    def _verdict(self, target: Target) -> Verdict:
        found = getattr(self, target.kind)
        value = float("nan") if found is None else found.median if isinstance(found, Spread) else found
        met = value <= target.bound if target.kind in _AT_MOST else value >= target.bound
        return Verdict(_TEXTS[target.kind].format(bound=target.bound), value, met)


_TEXTS: dict[Kind, str] = {
    "ratio": ">= {bound:g}x stock",
    "ratio_2_threads": ">= {bound:g}x stock with 2 threads",
    "of_limit": ">= {bound:.0%} of the limit",
    "microseconds": "<= {bound:g} us a tensor",
    "read_per_needed": "reads <= {bound:g} of what it needs",
    "mebibytes": "<= {bound:g} MiB",
}

_DURABLE = (Target("ratio", 1.6), Target("ratio_2_threads", 1.1), Target("of_limit", 0.85))
_SMALL = (Target("ratio", 10), Target("microseconds", 20))
_TARGETS: dict[tuple[str, int, str], tuple[Target, ...]] = {
    ("W1", 1, "load warm"): (Target("ratio", 5), Target("of_limit", 0.6)),
    ("W1", 1, "load cold"): (Target("ratio", 3.5), Target("of_limit", 0.9)),
    ("W1", 1, "save durable"): _DURABLE,
    ("W1", 4, "save durable"): _DURABLE,
    ("W1", 1, "save"): (Target("ratio", 2), Target("ratio_2_threads", 1.3)),
    ("W1-opt", 1, "load warm"): (Target("ratio", 2), Target("of_limit", 0.6)),
    ("W2", 1, "save durable"): _SMALL,
    ("W2", 1, "save"): _SMALL,
    ("W2", 1, "load warm"): _SMALL,
}
_LIMITS = {
    "save durable": ("raw_direct_write",),
    "save": ("raw_write", "raw_write_2_files"),
    "load warm": ("raw_read_warm_2_threads",),
    "load cold": ("raw_read_cold_1_thread", "raw_read_cold_2_threads"),
}
"""Where there are several, the one with the smaller median counts: nobody gets an easy yardstick."""


def _ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Pair by pair within a round, so that a slow minute of the machine falls on both."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def _others(others: dict[str, list[float]]) -> float | None:
    values = [value for samples in others.values() for value in samples]
    return statistics.median(values) if values else None


def save_load_row(measured: Measurement) -> Row:
    """The row of one operation of one workload."""
    samples = measured.samples
    ours = samples["ours"]
    limit = min(_LIMITS[measured.operation], key=lambda name: statistics.median(samples[name]))
    row = Row(
        measured.workload,
        measured.ranks,
        measured.operation,
        measured.size_bytes / 1e9,
        Spread.of(ours),
        stock=Spread.of(samples["stock"]),
        ratio=_ratios(samples["stock"], ours),
        limit_name=limit,
        limit=Spread.of(samples[limit]),
        of_limit=_ratios(samples[limit], ours).median,
        others=_others(measured.others),
    )
    if "stock_2_threads" in samples:
        row.stock_2_threads = Spread.of(samples["stock_2_threads"])
        row.ratio_2_threads = _ratios(samples["stock_2_threads"], ours)
    if measured.workload == "W2":
        row.microseconds = row.ours.median / measured.tensors * 1e6
    return row.judge(_TARGETS.get((measured.workload, measured.ranks, measured.operation), ()))


def reshard_row(measured: Resharding) -> Row:
    """The row of one case of R1."""
    samples = measured.samples
    row = Row(
        "R1",
        measured.ranks,
        f"load 4 ranks' dim 0 on dim {measured.dim}",
        measured.size_bytes / 1e9,
        Spread.of(samples["ours"]),
        stock=Spread.of(samples["stock"]),
        ratio=_ratios(samples["stock"], samples["ours"]),
        read_per_needed=measured.bytes_read["ours"] / measured.size_bytes,
        stock_read_per_needed=measured.bytes_read["stock"] / measured.size_bytes,
        others=_others(measured.others),
    )
    if measured.dim == 0:
        return row.judge((Target("ratio", 1), Target("read_per_needed", 1.02)))
    return row.judge((Target("ratio", 2),))


def memory_row(workload: str, operation: str, gigabytes: float, ours: float, stock: float) -> Row:
    """The row of the memory beyond the state, in MiB; it has no times."""
    nothing = float("nan")
    row = Row(workload, 1, f"{operation}, peak memory", gigabytes, Spread(nothing, nothing, nothing))
    row.mebibytes, row.stock_mebibytes = ours, stock
    return row.judge((Target("mebibytes", 64),))
