"""Targets of the project, and the rows of the table with the measured figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.peers import PEERS
from benchmarks.resharding import Resharding
from benchmarks.rounds import Measurement

__all__ = [
    "Promise",
    "PromiseCheck",
    "Row",
    "Spread",
    "async_memory_row",
    "async_row",
    "device_row",
    "loop_rows",
    "memory_row",
    "others_cores",
    "peer_rows",
    "plan_row",
    "ratios",
    "reshard_row",
    "row_beside_stock",
    "save_load_row",
]

Kind = Literal[
    "ratio",
    "ratio_tuned",
    "of_limit",
    "times_limit",
    "lost",
    "microseconds",
    "milliseconds",
    "read_per_needed",
    "mebibytes",
    "ratio_peer",
    "peer_gain",
]

_AT_MOST = (
    "peer_gain",
    "times_limit",
    "lost",
    "microseconds",
    "milliseconds",
    "read_per_needed",
    "mebibytes",
)


@dataclass(frozen=True)
class Promise:
    """A bound for one figure of a row: at least, or at most for costs."""

    kind: Kind
    bound: float


@dataclass(frozen=True)
class PromiseCheck:
    """A target with the measured figure."""

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
        """Return the spread of the samples of one contender."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Row:
    """One row of the table. Times are in seconds; ratios above 1 mean that dcphub is faster.

    *Stock tuned* is stock with the setting that suits the row best: two threads, or a reused stager. ``peer``
    is another package for the same operation; ``peer_gain`` is how much faster it would be. ``lost`` is the
    fraction of the steps per second that a training loop loses; ``cost`` the seconds of training per save.
    ``cpu_seconds`` are those of a save on all cores, ranks and writer processes included. ``percentile_90``
    is the lower bound of the slowest tenth of the samples. ``others`` is the median of the cores that other
    processes kept busy: above 0.2, measure again.
    """

    workload: str
    ranks: int
    operation: str
    gigabytes: float
    ours: Spread
    stock: Spread | None = None
    stock_tuned: Spread | None = None
    ratio: Spread | None = None
    ratio_tuned: Spread | None = None
    peer_name: str = ""
    peer: Spread | None = None
    ratio_peer: Spread | None = None
    peer_gain: float | None = None
    limit_name: str = ""
    limit: Spread | None = None
    of_limit: float | None = None
    times_limit: float | None = None
    lost: float | None = None
    stock_lost: float | None = None
    cost: Spread | None = None
    stock_cost: Spread | None = None
    cpu_seconds: float | None = None
    stock_cpu_seconds: float | None = None
    microseconds: float | None = None
    milliseconds: float | None = None
    read_per_needed: float | None = None
    stock_read_per_needed: float | None = None
    mebibytes: float | None = None
    others: float | None = None
    stock_mebibytes: float | None = None
    percentile_90: float | None = None
    stock_percentile_90: float | None = None
    verdicts: tuple[PromiseCheck, ...] = ()

    def judge(self, targets: Sequence[Promise]) -> Row:
        """Fill in the verdicts."""
        self.verdicts = tuple(self._verdict(target) for target in targets)
        return self

    def _verdict(self, target: Promise) -> PromiseCheck:
        found = getattr(self, target.kind)
        value = float("nan") if found is None else found.median if isinstance(found, Spread) else found
        met = value <= target.bound if target.kind in _AT_MOST else value >= target.bound
        return PromiseCheck(_TEXTS[target.kind].format(bound=target.bound, peer=self.peer_name), value, met)


_TEXTS: dict[Kind, str] = {
    "ratio": ">= {bound:g}x stock",
    "ratio_tuned": ">= {bound:g}x stock, tuned",
    "of_limit": ">= {bound:.0%} of the limit",
    "times_limit": "<= {bound:g}x the limit",
    "lost": "loses < {bound:.0%} of the steps per second",
    "microseconds": "<= {bound:g} us a tensor",
    "milliseconds": "<= {bound:g} ms",
    "read_per_needed": "reads <= {bound:g} of what it needs",
    "mebibytes": "<= {bound:g} MiB",
    "ratio_peer": ">= {bound:g}x {peer}",
    "peer_gain": "{peer} is <= {bound:g}x as fast",
}

_DURABLE = (Promise("ratio", 1.6), Promise("ratio_tuned", 1.1), Promise("of_limit", 0.85))
_SMALL = (Promise("ratio", 10), Promise("microseconds", 20))
_TARGETS: dict[tuple[str, int, str], tuple[Promise, ...]] = {
    ("W1", 1, "load warm"): (Promise("ratio", 5), Promise("of_limit", 0.6)),
    ("W1", 1, "load cold"): (Promise("ratio", 3.5), Promise("of_limit", 0.9)),
    ("W1", 1, "save durable"): _DURABLE,
    ("W1", 4, "save durable"): _DURABLE,
    ("W1", 1, "save"): (Promise("ratio", 2), Promise("ratio_tuned", 1.3)),
    ("W1-opt", 1, "load warm"): (Promise("ratio", 2), Promise("of_limit", 0.6)),
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
"""Limits of each row; the limit with the smallest median counts."""


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the ratios within each round, so that a slow minute of the machine affects both sides."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def percentile_90(samples: Sequence[float]) -> float:
    """Return the smallest sample that is not below nine tenths of the samples; do not interpolate."""
    return sorted(samples)[math.ceil(0.9 * len(samples)) - 1]


def others_cores(others: dict[str, list[float]]) -> float | None:
    """Return the median over all contenders, or None if nothing was timed."""
    values = [value for samples in others.values() for value in samples]
    return statistics.median(values) if values else None


def save_load_row(measured: Measurement) -> Row:
    """Return the row of one operation of one workload."""
    row = row_beside_stock(measured, _LIMITS[measured.operation])
    return row.judge(_TARGETS.get((measured.workload, measured.ranks, measured.operation), ()))


def row_beside_stock(measured: Measurement, limits: Sequence[str]) -> Row:
    """Return the row beside stock and the limit; of several limits the one with the smallest median
    counts."""
    samples, ours = measured.samples, measured.samples["ours"]
    limit = min(limits, key=lambda name: statistics.median(samples[name]))
    row = Row(
        measured.workload,
        measured.ranks,
        measured.operation,
        measured.size_bytes / 1e9,
        Spread.of(ours),
        stock=Spread.of(samples["stock"]),
        ratio=ratios(samples["stock"], ours),
        limit_name=limit,
        limit=Spread.of(samples[limit]),
        of_limit=ratios(samples[limit], ours).median,
        others=others_cores(measured.others),
    )
    if "stock_2_threads" in samples:
        row.stock_tuned = Spread.of(samples["stock_2_threads"])
        row.ratio_tuned = ratios(samples["stock_2_threads"], ours)
    if measured.workload == "W2":
        row.microseconds = row.ours.median / measured.tensors * 1e6
    return row


def peer_rows(measured: Measurement, kind: str | None = None) -> list[Row]:
    """Return a row for each timed package, beside dcphub or the ``kind`` of its asynchronous writer."""
    samples = measured.samples
    ours, operation = "ours", measured.operation
    if kind is not None:
        ours, operation = f"ours_{kind}", f"{operation}, {kind} writer"
    return [
        Row(
            measured.workload,
            measured.ranks,
            f"{operation}, vs {name}",
            measured.size_bytes / 1e9,
            Spread.of(samples[ours]),
            peer_name=name,
            peer=Spread.of(samples[name]),
            ratio_peer=ratios(samples[name], samples[ours]),
            others=others_cores(measured.others),
        )
        for name in PEERS
        if name in samples
    ]


def reshard_row(measured: Resharding) -> Row:
    """Return the row of one case of R1."""
    samples = measured.samples
    row = Row(
        "R1",
        measured.ranks,
        f"load 4 ranks' dim 0 on dim {measured.dim}",
        measured.size_bytes / 1e9,
        Spread.of(samples["ours"]),
        stock=Spread.of(samples["stock"]),
        ratio=ratios(samples["stock"], samples["ours"]),
        read_per_needed=measured.bytes_read["ours"] / measured.size_bytes,
        stock_read_per_needed=measured.bytes_read["stock"] / measured.size_bytes,
        others=others_cores(measured.others),
    )
    if measured.dim == 0:
        return row.judge((Promise("ratio", 1), Promise("read_per_needed", 1.02)))
    return row.judge((Promise("ratio", 2),))


def memory_row(workload: str, operation: str, gigabytes: float, ours: float, stock: float) -> Row:
    """Return the row of the memory beyond the state, in MiB, without times."""
    nothing = float("nan")
    row = Row(workload, 1, f"{operation}, peak memory", gigabytes, Spread(nothing, nothing, nothing))
    row.mebibytes, row.stock_mebibytes = ours, stock
    return row.judge((Promise("mebibytes", 64),))


_ASYNC_LIMITS = {
    "async_save first": ("first_copy_2_threads",),
    "async_save": ("memory_copy", "memory_copy_2_threads"),
    "async_save committed": ("raw_direct_write",),
}
_BLOCKING = (Promise("times_limit", 1.3), Promise("ratio", 2))


def async_row(measured: Measurement, kind: str) -> Row:
    """Return the row of the thread or process writer for one figure of asynchronous saving."""
    samples = measured.samples
    ours = samples[f"ours_{kind}"]
    limit = min(_ASYNC_LIMITS[measured.operation], key=lambda name: statistics.median(samples[name]))
    row = Row(
        measured.workload,
        measured.ranks,
        f"{measured.operation}, {kind} writer",
        measured.size_bytes / 1e9,
        Spread.of(ours),
        stock=Spread.of(samples["stock"]),
        ratio=ratios(samples["stock"], ours),
        stock_tuned=Spread.of(samples["stock_reused"]),
        ratio_tuned=ratios(samples["stock_reused"], ours),
        limit_name=limit,
        limit=Spread.of(samples[limit]),
        of_limit=ratios(samples[limit], ours).median,
        times_limit=ratios(ours, samples[limit]).median,
        others=others_cores(measured.others),
        percentile_90=percentile_90(ours),
        stock_percentile_90=percentile_90(samples["stock"]),
    )
    if spent := measured.facts.get("cpu_seconds"):
        row.cpu_seconds = statistics.median(spent[f"ours_{kind}"])
        row.stock_cpu_seconds = statistics.median(spent["stock"])
    judged = measured.workload in ("W1", "W4") and measured.operation == "async_save"
    return row.judge(_BLOCKING if judged else ())


def async_memory_row(workload: str, operation: str, gigabytes: float, ours: float, stock: float) -> Row:
    """Return the row of the memory that asynchronous saves take or keep beyond the state, in MiB."""
    nothing = float("nan")
    row = Row(workload, 1, operation, gigabytes, Spread(nothing, nothing, nothing))
    row.mebibytes, row.stock_mebibytes = ours, stock
    return row


def loop_rows(measured: Measurement) -> list[Row]:
    """Return rows of seconds per step with each writer beside stock's of the same kind; the limit is a
    loop without saves."""
    rows = []
    samples, limit = measured.samples, measured.samples["no_saves"]
    for kind, stock in (("process", "stock_process"), ("thread", "stock")):
        ours = samples[f"ours_{kind}"]
        costs = measured.facts["cost_seconds"]
        row = Row(
            measured.workload,
            measured.ranks,
            f"training step, saves each 20, {kind} writer",
            measured.size_bytes / 1e9,
            Spread.of(ours),
            stock=Spread.of(samples[stock]),
            ratio=ratios(samples[stock], ours),
            limit_name="no saves",
            limit=Spread.of(limit),
            of_limit=ratios(limit, ours).median,
            lost=1 - ratios(limit, ours).median,
            stock_lost=1 - ratios(limit, samples[stock]).median,
            cost=Spread.of(costs[f"ours_{kind}"]),
            stock_cost=Spread.of(costs[stock]),
            others=others_cores(measured.others),
        )
        rows.append(row.judge((Promise("lost", 0.05),) if kind == "process" else ()))
    return rows


def plan_row(measured: Measurement) -> Row:
    """Return the row of planning a save, first or repeated."""
    samples = measured.samples
    row = Row(
        measured.workload,
        measured.ranks,
        measured.operation,
        measured.size_bytes / 1e9,
        Spread.of(samples["ours"]),
        stock=Spread.of(samples["stock"]),
        ratio=ratios(samples["stock"], samples["ours"]),
        others=others_cores(measured.others),
    )
    row.milliseconds = row.ours.median * 1e3
    return row.judge((Promise("milliseconds", 50),) if measured.operation.startswith("plan again") else ())


_DEVICE_SIDES = {
    "stage": ("ours", "stock", "stock_pinned", "device_to_host"),
    "async_save on device": ("ours", "stock", "stock_pinned", ""),
    "async_save overlapping": ("ours_overlap", "stock_pinned", "", ""),
    "kernels while staging": ("ours_overlap", "stock_pinned", "", "kernels_alone"),
}
"""By operation: dcphub, stock, stock tuned (pinned, asynchronous), limit."""


def device_row(measured: Measurement) -> Row:
    """Return the row of one figure of staging from an accelerator, without figures that were not measured."""
    samples = measured.samples
    ours_name, stock, tuned, limit = _DEVICE_SIDES[measured.operation]
    ours = samples[ours_name]
    row = Row(
        measured.workload,
        measured.ranks,
        f"{measured.operation} ({measured.facts['device']})",
        measured.size_bytes / 1e9,
        Spread.of(ours),
        others=others_cores(measured.others),
    )
    if stock in samples:
        row.stock, row.ratio = Spread.of(samples[stock]), ratios(samples[stock], ours)
    if tuned in samples:
        row.stock_tuned, row.ratio_tuned = Spread.of(samples[tuned]), ratios(samples[tuned], ours)
    if limit in samples:
        row.limit_name, row.limit = limit, Spread.of(samples[limit])
        row.of_limit = ratios(samples[limit], ours).median
    return row.judge((Promise("of_limit", 0.8),) if measured.operation == "stage" else ())
