"""Draw docs/pictures/plan.svg from a save of four ranks: ``python -m tests.support.plan_picture``.

Four ranks save a sharded weight, and two ranks plan a load. The picture shows the byte ranges of the plan.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks

PICTURE: Final = Path(__file__).parents[2] / "docs/pictures/plan.svg"
_ROWS: Final = 10
_COLUMNS: Final = 8
_ROW_BYTES: Final = 4 * _COLUMNS
_SAVING: Final = 4
_LOADING: Final = 2
_COLOURS: Final = ("#4051b5", "#c2410c")


class Range(NamedTuple):
    """Bytes of one file for one rank."""

    rank: int
    file: str
    rows: str
    begin: int
    end: int


def _weight(ranks: int) -> torch.Tensor:
    mesh = DeviceMesh("cpu", list(range(ranks)))
    values = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).view(_ROWS, _COLUMNS)
    return distribute_tensor(values, mesh, [Shard(0)])


def save(_rank: int, ranks: int, folder: str) -> None:
    """Save the weight with all ranks."""
    dcp.save({"weight": _weight(ranks)}, checkpoint_id=folder)


def planned(rank: int, ranks: int, folder: str) -> list[Range]:
    """Return the byte ranges of the load plan of a rank."""
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(
        {"weight": _weight(ranks)}, dcp.FileSystemReader(folder).read_metadata(), rank == 0
    )
    index = dcp.open_index(folder)
    chunks = {index.box(chunk)[0]: chunk for chunk in range(index.chunk_count)}
    found = []
    for item in planner.create_local_plan().items:
        offset = tuple(item.storage_index.offset or ())
        chunk, first, rows = chunks[offset], item.storage_offsets[0], item.lengths[0]
        begin = int(index.payload_offsets[chunk]) + first * _ROW_BYTES
        start = offset[0] + first
        text = f"rows {start} to {start + rows - 1}" if rows > 1 else f"row {start}"
        file = index.files[int(index.chunk_files[chunk])]
        found.append(Range(rank, file, text, begin, begin + rows * _ROW_BYTES))
    return found


def drawn(found: list[Range]) -> str:
    """Return the picture: files on the left, the ranks that read them on the right."""
    step, height = 64, 40 + 64 * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" '
        'font-family="sans-serif" font-size="13">',
        "<title>Byte ranges that two ranks read from the files of four ranks</title>",
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
        '<text x="20" y="22" fill="#444">files of 4 saving ranks</text>',
        '<text x="580" y="22" fill="#444">2 loading ranks</text>',
    ]
    for rank in range(_LOADING):
        own = [number for number, one in enumerate(found) if one.rank == rank]
        top, size = 36 + own[0] * step, step * len(own) - 12
        parts += [
            f'<rect x="580" y="{top}" width="160" height="{size}" rx="6" fill="{_COLOURS[rank]}"/>',
            f'<text x="596" y="{top + 26}" fill="#fff">rank {rank}: weight</text>',
        ]
    for number, one in enumerate(found):
        top, colour = 36 + number * step, _COLOURS[one.rank]
        middle = top + (step - 12) / 2
        parts += [
            f'<rect x="20" y="{top}" width="250" height="{step - 12}" rx="6" fill="#f4f4f6" '
            f'stroke="{colour}"/>',
            f'<text x="34" y="{top + 22}" fill="#111">{one.file}</text>',
            f'<text x="34" y="{top + 41}" fill="#444">weight, {one.rows}</text>',
            f'<path d="M270 {middle:g} H570" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M580 {middle:g} l-12 -6 v12 z" fill="{colour}"/>',
            f'<text x="300" y="{middle - 8:g}" fill="{colour}">bytes {one.begin} to {one.end - 1}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Save with four ranks, plan a load with two, and draw the plan."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/step-1"
        run_ranks(_SAVING, save, place)
        plans = run_ranks(_LOADING, planned, place)
    PICTURE.write_text(drawn([one for plan in plans for one in sorted(plan, key=lambda one: one.file)]))


if __name__ == "__main__":
    from tests.support import plan_picture

    plan_picture.main()
