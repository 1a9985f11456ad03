"""Plans of downloads: a checkpoint as one file of safetensors or torch.save, laid out before it is read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from dcp.server.catalog.formats import DownloadFormat
from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.core.data.access import OpenCheckpoint
from dcp.server.core.data.responses import SMALL_BYTES, Body
from dcp.server.core.data.sharing import SharedValues, Wanted
from dcp.storage.formats.registry import target_named
from dcp.version import __version__

__all__ = [
    "DownloadOptions",
    "PlannedDownload",
    "Plans",
    "download_etag",
    "download_name",
    "is_small_download",
    "plan_download",
]

_SMALL_ENTRIES: Final = 1_000
_AT_ONCE: Final = 2
_KEPT_BYTES: Final = 96 << 20
_KEPT: Final = 64
_FORMAT: Final = (
    "torch is for torch.load(weights_only=True), unless numpy arrays or the like are among the values."
)

_Glob = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class DownloadOptions(QueryModel):
    """Options of a download, as for `dcp.convert`."""

    to: Annotated[DownloadFormat, Field(alias="format", description=_FORMAT)] = "safetensors"
    only: Annotated[list[_Glob] | None, Field(max_length=64, description="Globs of names.")] = None
    exclude: Annotated[list[_Glob] | None, Field(max_length=64, description="Globs of names.")] = None
    dtype: Annotated[
        str | None, Field(max_length=32, description="Floating-point tensors are cast to it.")
    ] = None
    drop_objects: Annotated[
        bool, Field(description="Leave out values that the format cannot hold, instead of refusing.")
    ] = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PlannedDownload:
    """A file to be made of ``source``. ``dropped`` names values that are not in it; ``held_bytes`` is about
    what both take."""

    source: OpenCheckpoint
    body: Body
    dropped: tuple[str, ...]
    held_bytes: int


def download_etag(opened: OpenCheckpoint, options: DownloadOptions) -> str:
    """The entity tag of the bytes: a layout depends on nothing but the files, the options and the version of
    dcp."""
    return opened.etag("download", __version__, options)


def download_name(opened: OpenCheckpoint, options: DownloadOptions) -> str:
    """The name of the file that a client is offered."""
    stem = opened.key.rpartition("/")[2]
    if opened.file is not None:
        stem = stem.rpartition(".")[0] or stem
    return f"{stem}{_suffix(options)}"


def _suffix(options: DownloadOptions) -> str:
    return target_named(options.to)[0].suffixes[0]


def is_small_download(opened: OpenCheckpoint) -> bool:
    """Check whether planning and sending all of it takes milliseconds."""
    index = opened.index
    entries = index.tensor_count + len(index.objects)
    return entries <= _SMALL_ENTRIES and index.tensor_bytes <= SMALL_BYTES // 4  # a cast may make it larger


def plan_download(
    opened: OpenCheckpoint, options: DownloadOptions, check: Wanted = lambda: None
) -> PlannedDownload:
    """The file that ``options`` make of the checkpoint. ``check`` is called between steps, to give up.

    Raises PlanError for what such a file cannot hold, and for globs that match nothing.
    """
    # Only here: a service is to answer soon after its start.
    from dcp.conversion.targets.job import ConversionOptions, LayoutJob
    from dcp.inspection.entries import choose_entries
    from dcp.planners.garbage_collection import garbage_collection_paused
    from dcp.server.core.data.planned import PlannedBody
    from dcp.storage.engine.read import ReadEngine

    store, index = opened.store, opened.whole_index
    check()
    entries = choose_entries(
        index, only=options.only or None, exclude=options.exclude or None, dtype=options.dtype
    )
    check()
    file_name = f"download{_suffix(options)}"
    with garbage_collection_paused(), ReadEngine(store, index, verify="blocks") as engine:
        of_target = ConversionOptions(options.to, drop_objects=options.drop_objects)
        planned = LayoutJob(entries, engine, of_target, file_name, save_id="", is_compared=True).plan()
        check()
        body = PlannedBody(engine, planned.layout)
    return PlannedDownload(opened, body, planned.dropped, opened.held_bytes + body.held_bytes)


class Plans:
    """Plans of downloads by entity tag: each made once however many need it, a few at a time.

    A plan of 100,000 tensors is half a second of a processor and tens of MiB; ranges of one download share
    it, and it is kept while it is in use. A plan whose last client has gone is cancelled.

    ``service.own(Plans)`` are those of one process.
    """

    def __init__(self, _service: object = None) -> None:
        self._values = SharedValues[str, PlannedDownload](count=_KEPT, kept_bytes=_KEPT_BYTES)
        self._pools = {
            is_small: ThreadPoolExecutor(threads, thread_name_prefix="dcp-plan")
            for is_small, threads in ((False, _AT_ONCE), (True, 2 * _AT_ONCE))
        }

    def __contains__(self, etag: str) -> bool:
        """Check whether the plan is kept, or being made."""
        return etag in self._values

    async def get(
        self, etag: str, make: Callable[[Wanted], PlannedDownload], *, is_small: bool = False
    ) -> PlannedDownload:
        """The plan called ``etag``; what ``make`` returns if there is none. Raises what it raises.

        ``make`` runs in a thread; small ones do not wait for others. Cancelled, it is given up, unless others
        wait for the same.
        """
        return await self._values.get_from(self._pools[is_small], etag, make)
