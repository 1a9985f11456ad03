"""A checkpoint: is it whole, what is in it, where it comes from, how it is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.data.access import DataDep
from dcp.server.http.dependencies import Caller, Db, PageParams, ServiceDep
from dcp.server.pages.queries import READ, pages_router
from dcp.server.pages.rendering import page
from dcp.server.pages.routes.actions import undo_of
from dcp.server.pages.routes.values.changes import changes_below, changes_of_list, diff_job
from dcp.server.pages.snippets import snippets_of
from dcp.server.routes.catalog import checkpoints as api
from dcp.server.routes.catalog import lineage as lineage_api
from dcp.server.routes.catalog import roots as roots_api
from dcp.server.routes.data import downloads as downloads_api
from dcp.server.routes.data import tensors as tensors_api
from dcp.server.routes.jobs import jobs as jobs_api
from dcp.server.routes.jobs import verification as verification_api
from dcp.server.schemas.checkpoints import CheckpointAnswer, CheckpointDetailAnswer
from dcp.server.schemas.common import IdPath
from dcp.server.schemas.findings import VerificationAnswer
from dcp.server.schemas.jobs import JobAnswer
from dcp.server.schemas.queries import CheckpointQuery
from dcp.storage.commit_names import METADATA_NAME
from dcp.storage.formats.registry import target_names

__all__ = ["router"]

router = pages_router()

_TENSORS: Final = 100
_ACTIVE: Final[Any] = ["queued", "planning", "running", "publishing"]


class TensorView(BaseModel):
    """What an address may say of tensors: a level of the tree below ``prefix``, or a list by ``glob``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    glob: Annotated[str, Field(max_length=254)] | None = None
    dtype: Annotated[str, Field(max_length=32)] | None = None
    kind: Literal["tensor", "object"] | None = None
    prefix: Annotated[str, Field(max_length=4096)] = ""
    view: Literal["tree", "list"] = "tree"
    colour: Literal["dtype", "bytes", "change"] = "dtype"
    cursor: Annotated[str, Field(max_length=16_384)] | None = None
    done: Annotated[str, Field(max_length=200)] | None = None

    @property
    def is_list(self) -> bool:
        """A filter is one of the whole list."""
        return self.view == "list" or bool(self.glob or self.dtype or self.kind)

    @property
    def pattern(self) -> str | None:
        """What is typed is a part of a name."""
        return None if self.glob is None else f"*{self.glob}*"


@router.get("/checkpoints/{checkpoint_id}", dependencies=READ)
def checkpoint_page(
    checkpoint_id: IdPath,
    view: Annotated[TensorView, Query()],
    request: Request,
    service: ServiceDep,
    database: Db,
    data: DataDep,
    caller: Caller,
) -> Response:
    """All about one checkpoint."""
    found = api.get_checkpoint(checkpoint_id, database, caller, Response())
    roots = {root.name: root for root in roots_api.list_all(service, caller).items}
    jobs = jobs_api.list_jobs(database, caller, PageParams(5, None), _ACTIVE, checkpoint_id=checkpoint_id)
    before = _neighbour(found, database, caller, is_next=False)
    verifications = verification_api.list_verifications(checkpoint_id, database, caller, 5).items
    return page(
        request,
        "checkpoint.html",
        twin=f"/api/v1/checkpoints/{checkpoint_id}",
        found=found,
        run_link=f"/runs/{found.run_id}",
        verifications=verifications,
        verified_by=_asker(verifications, database, caller),
        undo=undo_of(view.done, found, database, caller),
        lineage=lineage_api.get_lineage(checkpoint_id, database, caller),
        before=before,
        after=_neighbour(found, database, caller, is_next=True),
        snippets=snippets_of(found, roots.get(found.root), str(request.base_url)),
        jobs=jobs.items,
        roots=[root for root in roots.values() if root.is_configured and not root.readonly],
        targets=target_names(),
        is_readonly=found.root not in roots or roots[found.root].readonly,
        **_tensors(found, before, view, database, data, caller),
    )


def _tensors(
    of: CheckpointDetailAnswer,
    before: CheckpointAnswer | None,
    view: TensorView,
    database: Db,
    data: DataDep,
    caller: Caller,
) -> dict[str, Any]:
    params = PageParams(_TENSORS, view.cursor)
    if view.is_list:
        found: Any = tensors_api.list_tensors(
            of.id, database, data, caller, params, view.pattern, view.kind, view.dtype
        )
    else:
        found = tensors_api.tensor_tree(of.id, database, data, caller, params, view.prefix)
    largest = max((item.bytes for item in found.items), default=0) or 1
    compared = before is not None and view.colour == "change"
    job = diff_job(of, before, database, caller) if compared and before is not None else None
    return {
        "view": view,
        "change_job": job,
        "changes": _changes(job, view, found.items),
        "entries": [(item, 100 * item.bytes / largest) for item in found.items],
        "next_cursor": found.next_cursor,
        "parents": _parents(view.prefix),
    }


def _changes(job: JobAnswer | None, view: TensorView, entries: Any) -> dict[str, Any] | None:
    """By name; None where no job has compared them yet."""
    if job is None or job.state != "succeeded":
        return None
    return changes_of_list(job, entries) if view.is_list else changes_below(job, view.prefix, entries)


def _asker(verifications: list[VerificationAnswer], database: Db, caller: Caller) -> str | None:
    """Whose job the newest was: jobs that the catalog refers to are never forgotten."""
    job_id = verifications[0].job_id if verifications else None
    return None if job_id is None else jobs_api.get_job(job_id, database, caller).created_by


def _parents(prefix: str) -> list[tuple[str, str]]:
    """The last eight of the names above, each with what is below it."""
    parts = prefix.split(".") if prefix else []
    return [(part, ".".join(parts[: index + 1])) for index, part in enumerate(parts)][-8:]


def _neighbour(
    found: CheckpointDetailAnswer, database: Db, caller: Caller, *, is_next: bool
) -> CheckpointAnswer | None:
    """The committed one of the run before or after it, by step."""
    if found.step is None or (found.step == 0 and not is_next):
        return None
    wanted: dict[str, Any] = {"min_step": found.step + 1} if is_next else {"max_step": found.step - 1}
    query = CheckpointQuery(run_id=found.run_id, sort="step" if is_next else "-step", limit=1, **wanted)
    return next(iter(api.list_checkpoints(query, database, caller).items), None)


@router.get("/checkpoints/{checkpoint_id}/files", dependencies=READ)
def files_page(
    checkpoint_id: IdPath, request: Request, database: Db, data: DataDep, caller: Caller
) -> Response:
    """Its files, as they are in storage now, and whether stock torch finds what it needs among them."""
    found = api.get_checkpoint(checkpoint_id, database, caller, Response())
    files = downloads_api.list_files(checkpoint_id, data, caller).items
    return page(
        request,
        "files.html",
        twin=f"/api/v1/checkpoints/{checkpoint_id}/files",
        found=found,
        files=files,
        has_metadata=any(file.name == METADATA_NAME for file in files),
    )
