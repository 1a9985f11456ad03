"""Downloads: files of a checkpoint, and a checkpoint as one file generated during the download."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import Path, Query, Response
from fastapi.responses import RedirectResponse
from pydantic import Field, StringConstraints

from dcp.server.catalog.inputs import DownloadFormat, clean_text
from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.access import OpenCheckpoint, SharedValues, Wanted
from dcp.server.core.data.responses import (
    SMALL_BYTES,
    Body,
    BodyResponse,
    FileBody,
    PlannedResponse,
    binary,
    is_unchanged,
    not_modified,
)
from dcp.server.core.feature import Feature
from dcp.server.core.http.dependencies import requires
from dcp.server.core.http.routes import api_router
from dcp.server.core.problems import NotFoundError
from dcp.server.records.declaring import OneOf, Shown, moment
from dcp.storage.formats.registry import target_named
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, check_name
from dcp.version import __version__

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
        str | None, Field(max_length=32, description="Cast floating-point tensors to this dtype.")
    ] = None
    drop_objects: Annotated[
        bool, Field(description="Leave out values unsupported by the format instead of an error.")
    ] = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PlannedDownload:
    """File to generate from ``source``. ``dropped``: names of left-out values; ``held_bytes``: approximate
    memory of both."""

    source: OpenCheckpoint
    body: Body
    dropped: tuple[str, ...]
    held_bytes: int


def download_name(opened: OpenCheckpoint, options: DownloadOptions) -> str:
    """Return the file name of the download."""
    stem = opened.key.rpartition("/")[2]
    if opened.file is not None:
        stem = stem.rpartition(".")[0] or stem
    return f"{stem}{_suffix(options)}"


def _suffix(options: DownloadOptions) -> str:
    return target_named(options.to)[0].suffixes[0]


def plan_download(
    opened: OpenCheckpoint, options: DownloadOptions, check: Wanted = lambda: None
) -> PlannedDownload:
    """Plan the file. ``check`` is called between steps and raises to cancel.

    Raises PlanError for content that the format cannot hold, and for globs without a match.
    """
    # imported here to keep the start of the service fast
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
    """Plans of downloads by entity tag. Concurrent requests share a plan, and few plans are made at a time.

    A plan of 100,000 tensors takes half a second of a processor and tens of MiB. Ranges of one download share
    the plan. A plan without waiting clients is cancelled.

    ``service.own(Plans)`` are the plans of this process.
    """

    def __init__(self, _service: object = None) -> None:
        self._values = SharedValues[str, PlannedDownload](count=_KEPT, kept_bytes=_KEPT_BYTES)
        self._pools = {
            is_small: ThreadPoolExecutor(threads, thread_name_prefix="dcp-plan")
            for is_small, threads in ((False, _AT_ONCE), (True, 2 * _AT_ONCE))
        }

    def __contains__(self, etag: str) -> bool:
        """Check for a finished or running plan."""
        return etag in self._values

    async def get(
        self, etag: str, make: Callable[[Wanted], PlannedDownload], *, is_small: bool = False
    ) -> PlannedDownload:
        """Return the plan ``etag``, or make the plan. Raises errors of ``make``.

        ``make`` runs in a thread; small plans do not wait for others. A cancelled call cancels the plan
        unless others wait for it.
        """
        return await self._values.get_from(self._pools[is_small], etag, make)


# -- downloads -----------------------------------------------------------------------------------------------


feature: Final = Feature("downloads", __name__)
router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_ERRORS: Final = (400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_BYTES = problems(412, 416, *_ERRORS)

_PRESIGNED_SECONDS: Final = 300
"""Time to follow a redirect; running downloads continue."""

FileName = Annotated[
    str, Path(min_length=1, max_length=255, description="Name of a file, as listed for the checkpoint.")
]


FileRole = Literal["data", "commit", "other"]
"""data: tensors; commit: marks the folder as a checkpoint; other: for example config.json."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint; ``role``: "data", "commit" or "other"."""

    name: str
    bytes: int
    modified_at: datetime
    role: Annotated[
        str, OneOf(FileRole), Shown("data: contains tensors; commit: marks the folder as a checkpoint.")
    ]


@dataclass(frozen=True, slots=True)
class LostFile:
    """Data file of the index that is missing in storage or has another size."""

    name: str
    bytes: Annotated[int | None, Shown("In the storage; null: the file is missing.")]
    expected_bytes: Annotated[int | None, Shown("Written size; null if the index has no size.")]


@router.head("/download", name="head_download", include_in_schema=False)
@router.get(
    "/download",
    name="download_checkpoint",
    response_class=Response,
    responses={**binary("The generated file."), **_BYTES},
)
def download(checkpoint_id: IdPath, options: Annotated[DownloadOptions, Query()], ask: AskDep) -> Response:
    """Download the checkpoint as one safetensors or torch.save file.

    The size is known in advance, so interrupted downloads can continue (Range, If-Range). If the checkpoint
    is damaged, the connection is closed before the last byte.
    """
    found = ask.data.open(checkpoint_id)
    opened, plans = found.opened, ask.service.own(Plans)
    entries = opened.index.tensor_count + len(opened.index.objects)
    # the plan takes milliseconds; only a cast can increase the size
    is_small = entries <= _SMALL_ENTRIES and opened.index.tensor_bytes <= SMALL_BYTES // 4
    etag = opened.etag("download", __version__, options)  # the layout depends on nothing else
    if is_unchanged(ask.request.headers, etag):
        return not_modified(etag)

    share = ask.data.share(found)

    async def plan() -> BodyResponse:
        with found.problems():
            planned = await plans.get(etag, partial(plan_download, opened, options), is_small=is_small)
        headers = {"X-DCP-Dropped": str(len(planned.dropped))} if planned.dropped else {}
        return ask.data.answer(
            ask.request, found, planned.body, download_name(opened, options), etag, headers, share
        )

    return PlannedResponse(plan, ask.data.streams, share, lambda: not is_small and etag not in plans)


@dataclass(frozen=True, slots=True)
class FileList:
    """All files of a checkpoint by name, and missing files."""

    items: tuple[File, ...]
    missing: Annotated[tuple[LostFile, ...], Shown(may_be_absent=True)] = ()


@feature.get("/checkpoints/{checkpoint_id}/files", tag="data", errors=_ERRORS)
def list_files(checkpoint_id: IdPath, ask: Ask) -> FileList:
    """Return the checkpoint's own files, as they are in the storage now."""
    found = ask.data.open(checkpoint_id)
    with found.problems():
        files = _files_of(found.opened)
    return FileList(
        tuple(
            File(clean_text(info.name), info.size_bytes, moment(info.modified_seconds), role)
            for info, role in files
        ),
        tuple(replace(lost, name=clean_text(lost.name)) for lost in _lost_files(found.opened, files)),
    )


@router.head("/files/{name}", name="head_file", include_in_schema=False)
@router.get(
    "/files/{name}",
    name="download_file",
    response_class=Response,
    responses={
        **binary("The unchanged file."),
        307: {"description": "The storage gives the file itself: follow, without the key, within minutes."},
        **_BYTES,
    },
)
def download_file(
    checkpoint_id: IdPath,
    name: FileName,
    ask: AskDep,
    redirect: Annotated[
        bool, Query(description="Redirect with 307 for storage on S3; other files pass through the service.")
    ] = True,
) -> Response:
    """Download one file of the checkpoint unchanged and unverified."""
    request = ask.request
    found = ask.data.open(checkpoint_id)
    with found.problems():
        info = _file_of(found.opened, name)
        etag = found.opened.etag("file", info.name, info.size_bytes, info.modified_seconds)
        if is_unchanged(request.headers, etag):
            return not_modified(etag)
        sign = getattr(found.opened.store, "presigned_url", None)  # supported by some storages only
        url = sign and redirect and request.method == "GET" and sign(name, _PRESIGNED_SECONDS)
    if url:
        return RedirectResponse(url, 307, {"Cache-Control": "no-store"})
    body = FileBody(found.opened.store, info.name, info.size_bytes)
    return ask.data.answer(request, found, body, name, etag)


# -- files in the storage ------------------------------------------------------------------------------------


def _files_of(opened: OpenCheckpoint) -> list[tuple[FileInfo, FileRole]]:
    """Return all files of the checkpoint by name, with roles.

    Raises errors of the store.
    """
    from dcp.storage.commit_names import is_commit_object  # imports numpy

    if opened.file is not None:
        info = opened.store.stat(opened.file)
        return [] if info is None else [(info, "data")]
    data = set(opened.index.files)
    found: list[tuple[FileInfo, FileRole]] = []
    for info in opened.store.list():
        if not info.name.startswith(TEMPORARY_PREFIX):
            is_commit = is_commit_object(info.name)
            found.append((info, "data" if info.name in data else "commit" if is_commit else "other"))
    return found


def _lost_files(opened: OpenCheckpoint, present: Iterable[tuple[FileInfo, FileRole]]) -> list[LostFile]:
    """Return data files of the index that are absent from ``present`` or have another size."""
    from dcp.storage.formats.index import UNKNOWN

    sizes = {info.name: info.size_bytes for info, _ in present}
    found = []
    for name, size in zip(opened.index.files, opened.index.file_sizes.tolist(), strict=True):
        expected = None if size == UNKNOWN else size
        if name not in sizes or expected not in (None, sizes[name]):
            found.append(LostFile(name, sizes.get(name), expected))
    return found


def _file_of(opened: OpenCheckpoint, name: str) -> FileInfo:
    """Return the file ``name``. Raises NotFoundError, CheckpointFormatError for an invalid name, and errors
    of the store."""
    info = None
    if opened.file in (None, name) and not check_name(name).startswith(TEMPORARY_PREFIX):
        info = opened.store.stat(name)
    if info is None:
        raise NotFoundError(f"the checkpoint has no file {name[:255]!r}")
    return info
