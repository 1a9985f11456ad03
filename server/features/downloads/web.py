"""Downloads: a checkpoint as one file that is made while it is sent, and its own files as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final

from fastapi import Depends, Path, Query, Response
from fastapi.responses import RedirectResponse
from pydantic import StringConstraints

from dcp.server.catalog.formats import DownloadFormat
from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.bodies import FileBody
from dcp.server.core.data.responses import (
    BodyResponse,
    PlannedResponse,
    binary,
    is_unchanged,
    not_modified,
)
from dcp.server.core.http.dependencies import requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.downloads import feature
from dcp.server.features.downloads.files import file_etag, file_of, files_of, lost_files, presigned_url
from dcp.server.features.downloads.plans import (
    DownloadOptions,
    Plans,
    download_etag,
    download_name,
    is_small_download,
    plan_download,
)
from dcp.server.records.contents import File, LostFile
from dcp.server.records.declaring import Shown, moment

__all__ = ["list_files", "router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_ERRORS: Final = (400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_FORMAT = "torch is for torch.load(weights_only=True), unless numpy arrays or the like are among the values."
_BYTES = problems(412, 416, *_ERRORS)

Glob = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
FileName = Annotated[str, Path(min_length=1, max_length=255)]


def _options(
    to: Annotated[DownloadFormat, Query(alias="format", description=_FORMAT)] = "safetensors",
    only: Annotated[list[Glob] | None, Query(max_length=64, description="Globs of names.")] = None,
    exclude: Annotated[list[Glob] | None, Query(max_length=64, description="Globs of names.")] = None,
    dtype: Annotated[
        str | None, Query(max_length=32, description="Floating-point tensors are cast to it.")
    ] = None,
    drop_objects: Annotated[
        bool, Query(description="Leave out values that the format cannot hold, instead of refusing.")
    ] = False,
) -> DownloadOptions:
    return DownloadOptions(to, tuple(only or ()), tuple(exclude or ()), dtype, drop_objects)


Options = Annotated[DownloadOptions, Depends(_options)]


@router.head("/download", name="head_download", include_in_schema=False)
@router.get(
    "/download",
    name="download_checkpoint",
    response_class=Response,
    responses={**binary("The file, made while it is sent."), **_BYTES},
)
def download(checkpoint_id: IdPath, options: Options, ask: AskDep) -> Response:
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
        files = files_of(found.opened)
    return FileList(
        tuple(
            File(clean_text(info.name), info.size_bytes, moment(info.modified_seconds), role)
            for info, role in files
        ),
        tuple(replace(lost, name=clean_text(lost.name)) for lost in lost_files(found.opened, files)),
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
        info = file_of(found.opened, name)
        etag = file_etag(found.opened, info)
        if is_unchanged(request.headers, etag):
            return not_modified(etag)
        url = presigned_url(found.opened, name) if redirect and request.method == "GET" else None
    if url is not None:
        return RedirectResponse(url, 307, {"Cache-Control": "no-store"})
    body = FileBody(found.opened.store, info.name, info.size_bytes)
    return ask.data.answer(request, found, body, name, etag)
