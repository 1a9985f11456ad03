"""The page of a tensor: its values, its chunks, and the states that an optimizer keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from dcp.server.catalog.queries.listing import neighbour
from dcp.server.core.ask import Ask
from dcp.server.core.pages.marks import LARGE, mark_of
from dcp.server.core.problems import ProblemError
from dcp.server.features.checkpoints.snippets import Snippet
from dcp.server.features.statistics.job import StatsKind, StatsParams
from dcp.server.features.tensors import feature
from dcp.server.features.tensors.histograms import histogram_picture
from dcp.server.features.tensors.panels import panel_of
from dcp.server.features.tensors.reading import (
    LARGE_BYTES,
    SMALL_BYTES,
    NamedDep,
    NamedTensor,
    statistics_of,
)

if TYPE_CHECKING:
    from dcp.server.records.contents import Chunk, ShardedTensor

_CHUNKS: Final = 200
_MAX_BOXES: Final = 1024
"""More boxes cannot be distinguished, and make the page too large."""
_PANELS: Final = 4


@feature.page("/checkpoints/{checkpoint_id}/tensors", "tensor.html")
def tensor_page(named: NamedDep, ask: Ask, read: bool = False) -> dict[str, Any]:
    """All about one tensor; with ``read`` also what takes reading some of it."""
    found = named.found
    before, after = (
        ask.find(neighbour, found, ask.visible, is_next=is_next, tensor=named.fqn) if named.is_plain else None
        for is_next in (False, True)
    )
    return {
        "twin": named.twin,
        "named": named,
        "found": found,
        "tensor": named.of,
        "boxes": _boxes_of(named.of),
        "chunks": named.of.chunks[:_CHUNKS],
        "before": before,
        "after": after,
        "snippets": _snippets(named, ask),
        "is_readable": named.stored_bytes <= LARGE_BYTES,
        "job": ask.last_job(StatsKind, StatsParams(checkpoint_id=found.id)),
        "large": LARGE,
        "read": read,
        **_values(named, ask, LARGE_BYTES if read else SMALL_BYTES),
    }


def _snippets(named: NamedTensor, ask: Ask) -> list[Snippet]:
    """Code that loads the tensor; no other is read."""
    place, fqn = ask.place_of(named.found), named.of.fqn
    return [
        Snippet("As a tensor", f"import dcp\n\nstate = dcp.read({place!r}, only={escape(fqn)!r})"),
        Snippet(
            "From this catalog, as an array",
            "from dcp.server.client import Client\n\n"
            f"with Client({str(ask.request.base_url).rstrip('/')!r}) as client:\n"
            f"    array = client.tensor({named.found.id}, {fqn!r})",
        ),
    ]


def _values(named: NamedTensor, ask: Ask, most_bytes: int) -> dict[str, Any]:
    """Statistics, histogram and panels, as far as they are kept or not too large to be read."""
    from dcp.server.features.tensors.optimizer_states import OptimizerStates

    statistics, fault = None, None
    try:
        statistics = statistics_of(ask, named.readable, named.of.fqn, most_bytes, with_histogram=True)
    except ProblemError as error:
        fault = error.detail
    histogram = None if statistics is None else (statistics.statistics or {}).get("histogram")
    with named.readable.problems():
        states = OptimizerStates(named.readable.opened.whole_index)
    return {
        "statistics": statistics,
        "fault": fault,
        "histogram": histogram_picture({named.of.fqn: histogram}),
        "mark": None if statistics is None else mark_of(statistics.dtype, statistics.statistics),
        "panels": [
            panel_of(kept, named, ask, most_bytes) for kept in islice(states.beside(named.of.fqn), _PANELS)
        ],
        "is_state": states.is_state(named.of.fqn),
    }


# -- chunks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A chunk, in per cent of width and height. All chunks of a rank have the same ``colour``."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    of: Chunk


@dataclass(frozen=True, slots=True)
class BoxPicture:
    """Boxes over two ``dimensions``: down (None: there is only one) and across."""

    boxes: tuple[DrawnBox, ...]
    dimensions: tuple[int | None, int]


def _boxes_of(tensor: ShardedTensor) -> BoxPicture | None:
    """The chunks of a tensor as boxes over the two dimensions that they cut.

    None where more are cut, where there are too many chunks, and for a tensor without elements.
    """
    shape = tensor.shape
    if not shape or 0 in shape or tensor.chunk_count > _MAX_BOXES:
        return None
    cut = [at for at, size in enumerate(shape) if any(chunk.sizes[at] != size for chunk in tensor.chunks)]
    if len(cut) > 2:
        return None
    others = sorted((at for at in range(len(shape)) if at not in cut), key=lambda at: (-shape[at], at))
    chosen = sorted([*cut, *others][:2])
    down, across = (None, chosen[0]) if len(chosen) == 1 else (chosen[0], chosen[1])
    holders = {holder: place for place, holder in enumerate(dict.fromkeys(map(_holder, tensor.chunks)))}
    boxes = []
    for chunk in tensor.chunks:
        (x, width), (y, height) = _extent(chunk, shape, across), _extent(chunk, shape, down)
        boxes.append(DrawnBox(x, y, width, height, holders[_holder(chunk)] % 6, chunk))
    return BoxPicture(tuple(boxes), (down, across))


def _holder(chunk: Chunk) -> str | int:
    return chunk.file if chunk.rank is None else chunk.rank


def _extent(chunk: Chunk, shape: Sequence[int], dimension: int | None) -> tuple[float, float]:
    """The begin and length of a chunk along ``dimension``, in per cent."""
    if dimension is None:
        return 0.0, 100.0
    size = shape[dimension]
    return round(100 * chunk.offsets[dimension] / size, 3), round(100 * chunk.sizes[dimension] / size, 3)
