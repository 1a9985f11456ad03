"""Downloads: a checkpoint as one file that is made while it is sent, and its own files as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import Path, Query, Response
from fastapi.responses import RedirectResponse

from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.access import OpenCheckpoint
from dcp.server.core.data.responses import (
    BodyResponse,
    FileBody,
    PlannedResponse,
    binary,
    is_unchanged,
    not_modified,
)
from dcp.server.core.http.dependencies import requires
from dcp.server.core.http.routes import api_router
from dcp.server.core.problems import NotFoundError
from dcp.server.features.downloads import feature
from dcp.server.features.downloads.plans import (
    DownloadOptions,
    Plans,
    download_etag,
    download_name,
    is_small_download,
    plan_download,
)
from dcp.server.records.declaring import OneOf, Shown, moment
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, check_name

__all__ = ["list_files", "router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_ERRORS: Final = (400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_BYTES = problems(412, 416, *_ERRORS)

_PRESIGNED_SECONDS: Final = 300
"""Enough to follow a redirect; it does not end a download that has begun."""

FileName = Annotated[str, Path(min_length=1, max_length=255)]


FileRole = Literal["data", "commit", "other"]
"""It holds tensors; it makes the folder a checkpoint; it is another file (config.json)."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint; ``role``: "data", "commit" or "other"."""

    name: str
    bytes: int
    modified_at: datetime
    role: Annotated[
        str, OneOf(FileRole), Shown("data: it holds tensors; commit: it makes the folder a checkpoint.")
    ]


@dataclass(frozen=True, slots=True)
class LostFile:
    """A data file that the index names and that the storage does not have, or not whole."""

    name: str
    bytes: Annotated[int | None, Shown("In the storage; null: the file is missing.")]
    expected_bytes: Annotated[int | None, Shown("As written; null where the index does not record it.")]


@router.head("/download", name="head_download", include_in_schema=False)
@router.get(
    "/download",
    name="download_checkpoint",
    response_class=Response,
    responses={**binary("The file, made while it is sent."), **_BYTES},
)
def download(checkpoint_id: IdPath, options: Annotated[DownloadOptions, Query()], ask: AskDep) -> Response:
    """The checkpoint as one safetensors or torch.save file.

    Its size is known before, so that a download can go on where it broke off (Range, If-Range). If the
    checkpoint turns out to be damaged, the connection is closed before the last byte.
    """
    found = ask.data.open(checkpoint_id)
    opened, plans = found.opened, ask.service.own(Plans)
    is_small = is_small_download(opened)
    etag = download_etag(opened, options)
    if is_unchanged(ask.request.headers, etag):
        return not_modified(etag)

    async def plan() -> BodyResponse:
        with found.problems():
            planned = await plans.get(etag, partial(plan_download, opened, options), is_small=is_small)
        headers = {"X-DCP-Dropped": str(len(planned.dropped))} if planned.dropped else {}
        return ask.data.answer(
            ask.request, found, planned.body, download_name(opened, options), etag, headers
        )

    return PlannedResponse(plan, ask.data.streams, lambda: not is_small and etag not in plans)


@dataclass(frozen=True, slots=True)
class FileList:
    """All files of a checkpoint, by name; and those that it lacks."""

    items: tuple[File, ...]
    missing: Annotated[tuple[LostFile, ...], Shown(may_be_absent=True)] = ()


@feature.get("/checkpoints/{checkpoint_id}/files", tag="data", errors=_ERRORS)
def list_files(checkpoint_id: IdPath, ask: Ask) -> FileList:
    """The checkpoint's own files, as they are in the storage now."""
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
        **binary("The file as it is."),
        307: {"description": "The storage gives the file itself: follow, without the key, within minutes."},
        **_BYTES,
    },
)
def download_file(
    checkpoint_id: IdPath,
    name: FileName,
    ask: AskDep,
    redirect: Annotated[
        bool, Query(description="Answer with 307 where the storage is S3; else the service passes it on.")
    ] = True,
) -> Response:
    """One of the checkpoint's own files, as it is: nothing is compared."""
    request = ask.request
    found = ask.data.open(checkpoint_id)
    with found.problems():
        info = _file_of(found.opened, name)
        etag = _file_etag(found.opened, info)
        if is_unchanged(request.headers, etag):
            return not_modified(etag)
        url = _presigned_url(found.opened, name) if redirect and request.method == "GET" else None
    if url is not None:
        return RedirectResponse(url, 307, {"Cache-Control": "no-store"})
    body = FileBody(found.opened.store, info.name, info.size_bytes)
    return ask.data.answer(request, found, body, name, etag)


# -- files in the storage ------------------------------------------------------------------------------------


def _files_of(opened: OpenCheckpoint) -> list[tuple[FileInfo, FileRole]]:
    """All files of the checkpoint by name, with their roles; of a checkpoint of one file that one alone.

    Raises errors of the store.
    """
    from dcp.storage.commit_names import is_commit_object  # only here, as all that reads checkpoints

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
    """The data files that the index names and that are not among those ``present``, or of another size."""
    from dcp.storage.formats.index import UNKNOWN

    sizes = {info.name: info.size_bytes for info, _ in present}
    found = []
    for name, size in zip(opened.index.files, opened.index.file_sizes.tolist(), strict=True):
        expected = None if size == UNKNOWN else size
        if name not in sizes or expected not in (None, sizes[name]):
            found.append(LostFile(name, sizes.get(name), expected))
    return found


def _file_of(opened: OpenCheckpoint, name: str) -> FileInfo:
    """The file called ``name``. Raises NotFoundError, CheckpointFormatError for what cannot be a name, and
    errors of the store."""
    info = None
    if opened.file in (None, name) and not check_name(name).startswith(TEMPORARY_PREFIX):
        info = opened.store.stat(name)
    if info is None:
        raise NotFoundError(f"the checkpoint has no file {name[:255]!r}")
    return info


def _file_etag(opened: OpenCheckpoint, info: FileInfo) -> str:
    """An entity tag that changes whenever the file is replaced."""
    return opened.etag("file", info.name, info.size_bytes, info.modified_seconds)


def _presigned_url(opened: OpenCheckpoint, name: str) -> str | None:
    """A URL by which the storage itself serves the file; None where it cannot."""
    sign = getattr(opened.store, "presigned_url", None)
    return None if sign is None else sign(name, _PRESIGNED_SECONDS)
