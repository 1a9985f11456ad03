"""P1: simulate in one process the coordinator's planning of a save by many ranks.

    python benchmarks/plans/planning.py --ranks 1024 --tensors 1000 [--layout sharded|hybrid|replicated]
    [--stock]

Each rank has the same tensors: sharded on dimension 0 over all ranks, sharded over half of them and
replicated (HSDP), or replicated on all (DDP). Timed are the steps that grow with the number of ranks: decode
the gathered plans, plan, encode the replies. ``--stock`` also times torch's deduplication and global plan, on
a smaller size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dcp.planners.columns import SaveColumns, decode_save_columns, encode_rows, encode_save_columns
from dcp.planners.save.global_plan import plan_save
from dcp.storage.geometry.strides import starts

ROWS_PER_RANK = 4
COLUMNS = 1024


def rank_columns(rank: int, ranks: int, fqns: tuple[str, ...], layout: str) -> SaveColumns:
    """Return the columns that one rank sends."""
    count = len(fqns)
    shards = {"sharded": ranks, "hybrid": max(ranks // 2, 1), "replicated": 1}[layout]
    shape = [shards * ROWS_PER_RANK, COLUMNS]
    box = [rank % shards * ROWS_PER_RANK, 0]
    return SaveColumns(
        fqns=fqns,
        dtype_codes=np.full(count, 4, np.uint8),
        requires_grad=np.ones(count, np.uint8),
        shape_start=starts(np.full(count, 2)),
        shape_values=np.tile(shape, count).astype(np.int64),
        item_tensors=np.arange(count, dtype=np.int64),
        item_offsets=np.tile(box, count).astype(np.int64),
        item_sizes=np.tile([ROWS_PER_RANK, COLUMNS], count).astype(np.int64),
        item_local_offsets=np.zeros(2 * count, np.int64),
        item_sources=np.arange(count, dtype=np.int64),
        item_sharded=np.full(count, layout != "replicated", np.uint8),
        item_digests=np.full(count, 0 if shards == ranks else 7, np.uint64),
        item_ties=np.full(count, -1, np.int64),
        planner_data={fqn: tuple(fqn.split("/")) for fqn in fqns},
    )


def timed(seconds: dict[str, float], name: str, step: Callable[[], Any]) -> Any:
    """Run a step and record its seconds."""
    begun = time.perf_counter()
    result = step()
    seconds[name] = time.perf_counter() - begun
    return result


def run_ours(ranks: int, tensors: int, layout: str) -> dict[str, Any]:
    """Return seconds by step and bytes on the wire."""
    fqns = tuple(f"model/layers.{number}.feed_forward.weight" for number in range(tensors))
    seconds: dict[str, float] = {}
    local = [rank_columns(rank, ranks, fqns, layout) for rank in range(ranks)]
    wire = timed(
        seconds, "encode (sum over ranks)", lambda: [encode_save_columns(columns) for columns in local]
    )
    local.clear()
    cache: dict[bytes, Any] = {}
    received = timed(seconds, "decode", lambda: [decode_save_columns(data, cache) for data in wire])
    plan = timed(seconds, "plan", lambda: plan_save(received))
    replies = timed(seconds, "encode replies", lambda: [encode_rows(w) for w in plan.writes])
    return {
        "who": "dcphub",
        "ranks": ranks,
        "tensors": tensors,
        "layout": layout,
        "chunks": plan.index.chunk_count,
        "gathered_bytes": sum(map(len, wire)),
        "scattered_bytes": sum(map(len, replies)),
        "seconds": seconds,
        "coordinator_seconds": seconds["decode"] + seconds["plan"] + seconds["encode replies"],
    }


def run_stock(ranks: int, tensors: int, layout: str) -> dict[str, Any]:
    """Return seconds of torch's deduplication and global plan, without pickling."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    from dcp.planners.torch_plans import write_items

    fqns = tuple(f"model/layers.{number}.feed_forward.weight" for number in range(tensors))
    plans = [
        SavePlan(write_items(columns, fqns), planner_data=columns.planner_data)
        for columns in (rank_columns(rank, ranks, fqns, layout) for rank in range(ranks))
    ]
    seconds: dict[str, float] = {}
    _, metadata = timed(seconds, "plan", lambda: DefaultSavePlanner().create_global_plan(plans))
    return {
        "who": "torch",
        "ranks": ranks,
        "tensors": tensors,
        "layout": layout,
        "chunks": sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values()),
        "seconds": seconds,
        "coordinator_seconds": seconds["plan"],
    }


def show(result: dict[str, Any]) -> None:
    """Print one line per step."""
    print(f"{result['who']}: {result['ranks']} ranks x {result['tensors']} tensors, {result['layout']}")
    for step, value in result["seconds"].items():
        print(f"  {step:<26} {value:9.3f} s")
    chunks, total = result["chunks"], result["coordinator_seconds"]
    print(f"  {'coordinator':<26} {total:9.3f} s, {total / chunks * 1e6:.2f} us a chunk")
    if "gathered_bytes" in result:
        gathered, scattered = result["gathered_bytes"], result["scattered_bytes"]
        print(f"  {'wire':<26} {gathered / 1e6:9.2f} MB in, {scattered / 1e6:.2f} MB out")


def main() -> None:
    """Parse arguments, run, and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--layout", choices=("sharded", "hybrid", "replicated"), default="sharded")
    parser.add_argument("--stock", action="store_true", help="also torch's planner, on a smaller size")
    parser.add_argument("--stock-ranks", type=int, default=128)
    parser.add_argument("--stock-tensors", type=int, default=200)
    options = parser.parse_args()
    results = [run_ours(options.ranks, options.tensors, options.layout)]
    if options.stock:
        size = (options.stock_ranks, options.stock_tensors, options.layout)
        results += [run_ours(*size), run_stock(*size)]
    for result in results:
        show(result)
    if options.stock:
        ratio = results[2]["coordinator_seconds"] / results[1]["coordinator_seconds"]
        print(f"torch / dcphub at {size[0]} x {size[1]}: {ratio:.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
