"""``/checkpoints/{id}/download``, one file made while it is sent, and ``/files``, its own as they are."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Path, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import StringConstraints

from dcp.server.catalog.formats import DownloadFormat
from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataDep
from dcp.server.core.data.sending.bodies import FileBody
from dcp.server.core.data.sending.responses import (
    BodyResponse,
    PlannedResponse,
    choose_range,
    disposition,
    is_unchanged,
    not_modified,
)
from dcp.server.core.http.dependencies import Caller, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.downloads.files import file_etag, file_of, files_of, lost_files, presigned_url
from dcp.server.features.downloads.plans import (
    DownloadOptions,
    download_etag,
    download_name,
    is_small_download,
    plan_download,
    plans_of,
)
from dcp.server.features.tensors.answers import FileAnswer, FileList, LostFileAnswer, binary

__all__ = ["DATA_PROBLEMS", "router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

DATA_PROBLEMS = (400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_FORMAT = "torch is for torch.load(weights_only=True), unless numpy arrays or the like are among the values."
_BYTES = problems(412, 416, *DATA_PROBLEMS)

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
def download(
    checkpoint_id: IdPath, options: Options, request: Request, data: DataDep, caller: Caller
) -> Response:
    """The checkpoint as one safetensors or torch.save file.

    Its size is known before, so that a download can go on where it broke off (Range, If-Range). If the
    checkpoint turns out to be damaged, the connection is closed before the last byte.
    """
    found = data.open(checkpoint_id, caller)
    opened = found.opened
    is_small = is_small_download(opened)
    etag = download_etag(opened, options)
    if is_unchanged(request.headers, etag):
        return not_modified(etag)

    async def plan() -> BodyResponse:
        with found.problems():
            make = partial(plan_download, opened, options)
            planned = await data.service.own(plans_of).get(etag, make, is_small=is_small)
        headers = {"ETag": etag, "Content-Disposition": disposition(download_name(opened, options))}
        if planned.dropped:
            headers["X-DCP-Dropped"] = str(len(planned.dropped))
        chosen = choose_range(request.headers, planned.body.size_bytes, etag)
        return BodyResponse(
            planned.body,
            chosen,
            data.streams,
            headers=headers,
            problem=found.root.problem,
            is_allowed=found.is_allowed,
        )

    return PlannedResponse(
        plan, data.streams, lambda: not is_small and etag not in data.service.own(plans_of)
    )


@router.get("/files", responses=problems(*DATA_PROBLEMS))
def list_files(checkpoint_id: IdPath, data: DataDep, caller: Caller) -> FileList:
    """The checkpoint's own files, as they are in the storage now."""
    found = data.open(checkpoint_id, caller)
    with found.problems():
        files = files_of(found.opened)
    missing = [
        LostFileAnswer.of(lost, name=clean_text(lost.name)) for lost in lost_files(found.opened, files)
    ]
    items = [
        FileAnswer.of(file.info, name=clean_text(file.info.name), bytes=file.info.size_bytes, role=file.role)
        for file in files
    ]
    return FileList(items=items, missing=missing)


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
    request: Request,
    data: DataDep,
    caller: Caller,
    redirect: Annotated[
        bool, Query(description="Answer with 307 where the storage is S3; else the service passes it on.")
    ] = True,
) -> Response:
    """One of the checkpoint's own files, as it is: nothing is compared."""
    found = data.open(checkpoint_id, caller)
    with found.problems():
        file = file_of(found.opened, name)
        etag = file_etag(found.opened, file)
        if is_unchanged(request.headers, etag):
            return not_modified(etag)
        url = presigned_url(found.opened, file) if redirect and request.method == "GET" else None
    if url is not None:
        return RedirectResponse(url, 307, {"Cache-Control": "no-store"})
    body = FileBody(found.opened.store, file.info.name, file.info.size_bytes)
    return BodyResponse(
        body,
        choose_range(request.headers, body.size_bytes, etag),
        data.streams,
        headers={"ETag": etag, "Content-Disposition": disposition(name)},
        problem=found.root.problem,
        is_allowed=found.is_allowed,
    )
