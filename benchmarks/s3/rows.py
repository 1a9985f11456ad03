"""Rows of S1: saves and loads on S3 beside stock, plain requests, and the storage classes of other
packages."""

from __future__ import annotations

import statistics

from benchmarks.resharding import Resharding
from benchmarks.rounds import Measurement
from benchmarks.s3.store import LOAD, SAVE
from benchmarks.targets import Promise, Row, Spread, others_cores, ratios, row_beside_stock

__all__ = ["client_row", "object_reshard_row", "object_row"]

_CONNECTOR = "s3torchconnector"
_NEARLY_RAW = (Promise("of_limit", 0.8), Promise("ratio_peer", 1))
_TARGETS: dict[tuple[str, str], tuple[Promise, ...]] = {
    ("W1", SAVE): (Promise("ratio", 1.5), *_NEARLY_RAW),
    ("W1", LOAD): (Promise("ratio", 5), *_NEARLY_RAW),
    ("W2", LOAD): (Promise("ratio", 20),),
}
_RAW = {SAVE: "raw_put_", LOAD: "raw_get_"}
_PYTHON_CLIENTS = ("s3fs", "botocore", "http.client")


def object_row(measured: Measurement) -> Row:
    """Return the row beside stock; the limit is the client with the smallest median of plain requests."""
    samples = measured.samples
    row = row_beside_stock(measured, [name for name in samples if name.startswith(_RAW[measured.operation])])
    if _CONNECTOR in samples:
        row.peer_name = _CONNECTOR
        row.peer, row.ratio_peer = (
            Spread.of(samples[_CONNECTOR]),
            ratios(samples[_CONNECTOR], samples["ours"]),
        )
    targets = _TARGETS.get((measured.workload, measured.operation), ())
    return row.judge([target for target in targets if row.peer_name or target.kind != "ratio_peer"])


def client_row(measured: Measurement) -> Row | None:
    """Return the faster Python client beside obstore for plain requests, or None without obstore."""
    samples, prefix = measured.samples, _RAW[measured.operation]
    if f"{prefix}obstore" not in samples:
        return None
    there = [prefix + name for name in _PYTHON_CLIENTS if prefix + name in samples]
    python = min(there, key=lambda name: statistics.median(samples[name]))
    row = Row(
        measured.workload,
        measured.ranks,
        f"plain requests, {python.removeprefix(prefix)} vs obstore, {measured.operation}",
        measured.size_bytes / 1e9,
        Spread.of(samples[python]),
        peer_name="obstore",
        peer=Spread.of(samples[f"{prefix}obstore"]),
        ratio_peer=ratios(samples[f"{prefix}obstore"], samples[python]),
        others=others_cores(measured.others),
    )
    row.peer_gain = ratios(samples[python], samples[f"{prefix}obstore"]).median
    return row.judge((Promise("peer_gain", 1.3),))


def object_reshard_row(measured: Resharding) -> Row:
    """Return one case of R1 from S3. Stock does not report fetched bytes."""
    samples = measured.samples
    row = Row(
        "R1",
        measured.ranks,
        f"load 4 ranks' dim 0 on dim {measured.dim} from S3",
        measured.size_bytes / 1e9,
        Spread.of(samples["ours"]),
        stock=Spread.of(samples["stock"]),
        ratio=ratios(samples["stock"], samples["ours"]),
        read_per_needed=measured.bytes_read["ours"] / measured.size_bytes,
        others=others_cores(measured.others),
    )
    return row.judge((Promise("read_per_needed", 1.05),) if measured.dim == 0 else ())
