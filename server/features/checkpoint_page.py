"""Pages of a checkpoint: overview with the panels of other features, and files."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Query as InQuery
from pydantic import Field

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import Query
from dcp.server.catalog.listing import neighbour
from dcp.server.catalog.names import in_order
from dcp.server.catalog.structures import TreeNode, parts_of, tree_levels
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.http.dependencies import PageParams
from dcp.server.core.jobs.ledger.reading import get_job
from dcp.server.features.checkpoints import snippets_of
from dcp.server.features.diff import DiffKind, DiffParams
from dcp.server.features.diff.comparison import Differences
from dcp.server.features.downloads import list_files
from dcp.server.features.roots import roots_of
from dcp.server.features.tensors.routes import list_tensors, tensor_tree
from dcp.server.features.verify import Verification, newest_verifications
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail
from dcp.storage.commit_names import METADATA_NAME

feature: Final = Feature("checkpoint_page", __name__)


_TENSORS: Final = 100
_LEVELS: Final = 8


class TensorView(Query):
    """Query of the tensors: one level of the tree below ``prefix``, or a list by ``glob``."""

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
        """True if the page shows a list: filters apply to all tensors, not to one level."""
        return self.view == "list" or bool(self.glob or self.dtype or self.kind)

    @property
    def pattern(self) -> str | None:
        """Glob for names with the typed text."""
        return None if self.glob is None else f"*{self.glob}*"


@feature.page("/checkpoints/{checkpoint_id}", "checkpoint.html", panels="checkpoint")
def checkpoint_page(
    checkpoint_id: IdPath, view: Annotated[TensorView, InQuery()], ask: Ask
) -> dict[str, Any]:
    """Show a checkpoint."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    root = next((root for root in roots_of(ask) if root.name == found.root), None)
    before = ask.find(neighbour, found, ask.visible, is_next=False)
    return {
        "twin": f"/api/v1/checkpoints/{checkpoint_id}",
        "found": found,
        "run_link": f"/runs/{found.run_id}",
        **_verifications(checkpoint_id, ask, 5),
        "before": before,
        "after": ask.find(neighbour, found, ask.visible, is_next=True),
        "snippets": snippets_of(found, root, str(ask.request.base_url)),
        **_tensors(found, before, view, ask),
        "optimizers": _optimizers(found, ask),
    }


@feature.panel("checkpoint.notices", "checkpoint_notice.html", order=30)
def state_notice(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """Describe problems of the checkpoint."""
    return {}


@feature.panel("checkpoint", "checkpoint_actions.html", order=30)
def actions_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """Collect the forms of other features in one box."""
    return {}


@feature.page("/checkpoints/{checkpoint_id}/files", "checkpoint_files.html")
def files_page(checkpoint_id: IdPath, ask: Ask) -> dict[str, Any]:
    """List the files in storage now, and check the files that stock torch needs."""
    listed = list_files(checkpoint_id, ask)
    return {
        "twin": f"/api/v1/checkpoints/{checkpoint_id}/files",
        "found": ask.find(get_checkpoint, checkpoint_id, ask.visible),
        "files": sorted(listed.items, key=lambda file: in_order(file.name)),
        "missing": listed.missing,
        "has_metadata": any(file.name == METADATA_NAME for file in listed.items),
        **_verifications(checkpoint_id, ask, 1),
    }


def _verifications(checkpoint_id: int, ask: Ask, limit: int) -> dict[str, Any]:
    """Return the last verifications and the creator of the newest job. The catalog keeps jobs of
    verifications."""
    found: list[Verification] = ask.find(newest_verifications, checkpoint_id, ask.visible, limit=limit)
    job_id = found[0].job_id if found else None
    author = None if job_id is None else ask.find(get_job, job_id, ask.visible).created_by
    return {"verifications": found, "verified_by": author}


# -- tensors -------------------------------------------------------------------------------------------------


def _tensors(of: CheckpointDetail, before: Checkpoint | None, view: TensorView, ask: Ask) -> dict[str, Any]:
    page = PageParams(_TENSORS, view.cursor)
    if view.is_list:
        found: Any = list_tensors(of.id, ask, page, view.pattern, view.kind, view.dtype)
    else:
        found = tensor_tree(of.id, ask, page, view.prefix, collapsed=True)
    largest = max((item.bytes for item in found.items), default=0) or 1
    return {
        "view": view,
        **_changes(of, before, view, found.items, ask),
        "entries": [(item, 100 * item.bytes / largest) for item in found.items],
        "next_cursor": found.next_cursor,
        "parents": _parents(of, view.prefix, ask),
    }


def _changes(
    of: CheckpointDetail, before: Checkpoint | None, view: TensorView, entries: Any, ask: Ask
) -> dict[str, Any]:
    """Return changes since the previous step by name from the last job, or the job to submit."""
    nothing = {"changes": None, "is_cut": False, "change_job": None}
    if before is None or view.colour != "change" or of.state != "committed":
        return nothing
    kept = ask.service.own(Differences).kept(ask, before.id, of.id)
    job = ask.last_job(DiffKind, DiffParams(a=before.id, b=of.id), 0 if kept is None else kept[0].id)
    if kept is None:
        return nothing | {"change_job": job}
    from dcp.server.features.diff.differences import (
        changes_below,
        changes_of_list,
    )  # imported late: imports numpy

    _, found = kept
    changes = changes_of_list(found, entries) if view.is_list else changes_below(found, view.prefix, entries)
    return {"changes": changes, "is_cut": found.is_cut, "change_job": job}


def _optimizers(of: CheckpointDetail, ask: Ask) -> list[TreeNode]:
    """Return the optimizer's parts of the tree, to load weights without them; empty if all parts belong to
    it."""
    if "hx-request" in ask.request.headers:  # the other parts of the page
        return []
    found = [one for one in ask.find(parts_of, of.structure_id) if one.is_optimizer]
    return found if sum(one.tensors for one in found) < (of.tensor_count or 0) else []


def _parents(of: CheckpointDetail, prefix: str, ask: Ask) -> list[tuple[str, str]]:
    """Return up to eight parent levels, each with its prefix and the name relative to the previous level."""
    if of.structure_id is None:
        return []
    levels = ask.find(tree_levels, of.structure_id, prefix, _LEVELS)
    above = ["", *levels][:-1]
    return [
        (level[len(before) :].lstrip(".") or level, level)
        for before, level in zip(above, levels, strict=True)
    ]
