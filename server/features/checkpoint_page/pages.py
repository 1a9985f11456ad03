"""A checkpoint: is it whole, what is in it, where it comes from, how it is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.planners.weight_maps.weight_map import ready_maps
from dcp.server.catalog.audit import AuditEntry, last_removal
from dcp.server.catalog.names import in_order
from dcp.server.catalog.tensors import TreePart, parts_of
from dcp.server.catalog.verifications import list_verifications
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.http.dependencies import Caller, Db, PageParams, ServiceDep
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoint_page.actions import undo_of, writable_roots
from dcp.server.features.checkpoints import api
from dcp.server.features.checkpoints.answers import CheckpointAnswer, CheckpointDetailAnswer
from dcp.server.features.checkpoints.queries import CheckpointQuery
from dcp.server.features.checkpoints.snippets import snippets_of
from dcp.server.features.diff.changes import changes_below, changes_of_list
from dcp.server.features.diff.job import DiffKind, DiffParams
from dcp.server.features.diff.web import Differences
from dcp.server.features.downloads.web import list_files
from dcp.server.features.jobs import api as jobs_api
from dcp.server.features.lineage import api as lineage_api
from dcp.server.features.roots import api as roots_api
from dcp.server.features.tensors import api as tensors_api
from dcp.server.records.contents import Verification
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
    caller: Caller,
    ask: AskDep,
) -> Response:
    """All about one checkpoint."""
    found = api.get_checkpoint(checkpoint_id, database, caller, Response())
    roots = {root.name: root for root in roots_api.list_all(service, caller).items}
    jobs = jobs_api.list_jobs(database, caller, PageParams(5, None), _ACTIVE, checkpoint_id=checkpoint_id)
    before = _neighbour(found, database, caller, is_next=False)
    verifications = _verifications(checkpoint_id, database, caller, 5)
    return page(
        request,
        "checkpoint.html",
        twin=f"/api/v1/checkpoints/{checkpoint_id}",
        found=found,
        run_link=f"/runs/{found.run_id}",
        verifications=verifications,
        verified_by=_asker(verifications, database, caller),
        removal=_removal(found, database),
        undo=undo_of(view.done, found, database, caller),
        lineage=lineage_api.get_lineage(checkpoint_id, database, caller),
        before=before,
        after=_neighbour(found, database, caller, is_next=True),
        snippets=snippets_of(found, roots.get(found.root), str(request.base_url)),
        jobs=jobs.items,
        roots=writable_roots(service, caller),
        targets=target_names(),
        maps=list(ready_maps()),
        is_readonly=found.root not in roots or roots[found.root].readonly,
        **_tensors(found, before, view, ask),
        optimizers=_optimizers(found, request, ask),
    )


def _tensors(
    of: CheckpointDetailAnswer,
    before: CheckpointAnswer | None,
    view: TensorView,
    ask: Ask,
) -> dict[str, Any]:
    params = PageParams(_TENSORS, view.cursor)
    if view.is_list:
        found: Any = tensors_api.list_tensors(of.id, ask, params, view.pattern, view.kind, view.dtype)
    else:
        found = tensors_api.tensor_tree(of.id, ask, params, view.prefix)
    largest = max((item.bytes for item in found.items), default=0) or 1
    return {
        "view": view,
        **_changes(of, before, view, found.items, ask),
        "entries": [(item, 100 * item.bytes / largest) for item in found.items],
        "next_cursor": found.next_cursor,
        "parents": _parents(view.prefix),
    }


def _optimizers(of: CheckpointDetailAnswer, request: Request, ask: Ask) -> list[TreePart]:
    """What of it is an optimizer's, so that weights are had without it."""
    if "hx-request" in request.headers:  # for a part of the page that does not say so
        return []
    found = [one for one in ask.find(parts_of, of.structure_id) if one.is_optimizer]
    return found if sum(one.tensors for one in found) < (of.tensor_count or 0) else []


def _changes(
    of: CheckpointDetailAnswer,
    before: CheckpointAnswer | None,
    view: TensorView,
    entries: Any,
    ask: Ask,
) -> dict[str, Any]:
    """By name, as the last job has found them, and whether it keeps all; or the job that is to find out."""
    if before is None or view.colour != "change" or of.state != "committed":
        return {"changes": None, "is_cut": False, "change_job": None}
    kept = ask.service.own(Differences).kept(ask, before.id, of.id)
    job = ask.last_job(DiffKind, DiffParams(a=before.id, b=of.id), 0 if kept is None else kept[0].id)
    if kept is None:
        return {"changes": None, "is_cut": False, "change_job": job}
    _, found = kept
    changes = changes_of_list(found, entries) if view.is_list else changes_below(found, view.prefix, entries)
    return {"changes": changes, "is_cut": found.is_cut, "change_job": job}


def _verifications(checkpoint_id: int, database: Db, caller: Caller, limit: int) -> list[Verification]:
    with database.read() as connection:
        return list_verifications(connection, checkpoint_id, caller.roots, limit=limit)


def _asker(verifications: list[Verification], database: Db, caller: Caller) -> str | None:
    """Whose job the newest was: jobs that the catalog refers to are never forgotten."""
    job_id = verifications[0].job_id if verifications else None
    return None if job_id is None else jobs_api.get_job(job_id, database, caller).created_by


def _removal(found: CheckpointDetailAnswer, database: Db) -> AuditEntry | None:
    """Who deleted it and when, by the audit log; None of one that is there."""
    if found.state not in ("deleted", "purged"):
        return None
    with database.read() as connection:
        return last_removal(connection, found.id)


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
    checkpoint_id: IdPath, request: Request, database: Db, caller: Caller, ask: AskDep
) -> Response:
    """Its files, as they are in storage now, and whether stock torch finds what it needs among them."""
    found = api.get_checkpoint(checkpoint_id, database, caller, Response())
    listed = list_files(checkpoint_id, ask)
    verifications = _verifications(checkpoint_id, database, caller, 1)
    return page(
        request,
        "files.html",
        twin=f"/api/v1/checkpoints/{checkpoint_id}/files",
        found=found,
        files=sorted(listed.items, key=lambda file: in_order(file.name)),
        missing=listed.missing,
        has_metadata=any(file.name == METADATA_NAME for file in listed.items),
        verifications=verifications,
        verified_by=_asker(verifications, database, caller),
    )
