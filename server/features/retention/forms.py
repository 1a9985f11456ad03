"""Deletion and retention on the pages of checkpoints and runs: forms, notices and the preview."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query as InQuery
from pydantic import BaseModel, Field

from dcp.manager.retention import Retention
from dcp.server.catalog.audit import last_removal
from dcp.server.catalog.inputs import MAX_ID, Name, Query, Text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import Precondition
from dcp.server.features.retention import feature
from dcp.server.features.retention.planning import plan_run, tensor_bytes
from dcp.server.features.retention.policies import Keep
from dcp.server.features.retention.web import delete_checkpoint, restore_checkpoint
from dcp.server.records.administration import TensorBytes
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.runs import Run
from dcp.steps import OPTIMIZER

_Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
_Step = Annotated[int, Field(ge=0, le=MAX_ID)]
_Count = Annotated[int, Field(ge=1, le=10**12)]


@feature.panel("checkpoint.notices", "notice.html", order=20)
def deletion_notice(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Say who deleted the checkpoint and when, by the audit log, with the form that restores it."""
    is_gone = found.state in ("deleted", "purged")
    return {"removal": ask.find(last_removal, found.id) if is_gone else None}


@feature.panel("checkpoint.actions", "delete.html", order=40)
def delete_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Offer the deletion of a checkpoint whose root is not read-only."""
    root = ask.settings.roots.get(found.root)
    is_writable = root is not None and not root.readonly
    return {} if is_writable and ask.caller.may("delete") else None


@feature.form("/checkpoints/{checkpoint_id}/delete", scope="delete")
def delete_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Delete the checkpoint; until the grace period is over it can be restored."""
    delete_checkpoint(checkpoint_id, ask, _seen(ask))
    return f"/checkpoints/{checkpoint_id}?{urlencode({'done': 'deleted'})}"


@feature.form("/checkpoints/{checkpoint_id}/restore", scope="delete")
def restore_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Undo the deletion."""
    restore_checkpoint(checkpoint_id, ask, _seen(ask))
    return f"/checkpoints/{checkpoint_id}?{urlencode({'done': 'restored'})}"


def _seen(ask: Ask) -> Precondition:
    """The state that the page has shown: 412 if it was changed since."""
    return Precondition(ask.form.optional("etag"))


# -- the page of a run ---------------------------------------------------------------------------------------


class TensorBytesQuery(Query):
    """Tensors by their names, in checkpoints of which steps."""

    only: Annotated[
        tuple[_Pattern, ...],
        Field(max_length=16, description="Globs on names; those of optimizers, if not given."),
    ] = ()
    below_step: _Step | None = None


@feature.get("/runs/{run_id}/tensor-bytes", tag="runs")
def get_run_tensor_bytes(
    run_id: IdPath, query: Annotated[TensorBytesQuery, InQuery()], ask: Ask
) -> TensorBytes:
    """The bytes of tensors in the checkpoints of a run, by their names; of optimizers by default."""
    only = query.only or OPTIMIZER
    return ask.find(tensor_bytes, run_id, ask.visible, only=only, below_step=query.below_step)


class PreviewQuery(BaseModel):
    """The rules of a preview in the address of a run's page."""

    keep_last: _Count | None = None
    keep_every: _Count | None = None
    keep_best: _Count | None = None
    keep_metric: Name | None = None
    keep_mode: Literal["min", "max"] = "min"
    keep_optimizer: _Count | None = None
    keep_days: Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)] | None = None
    below_step: _Step | None = None

    @property
    def keep(self) -> Keep | None:
        """The rules; None if there are none."""
        given: dict[str, Any] = {"last": self.keep_last, "every_steps": self.keep_every}
        if self.keep_best and self.keep_metric:
            given["best"] = [{"metric": self.keep_metric, "count": self.keep_best, "mode": self.keep_mode}]
        if self.keep_days:
            given["younger_than_seconds"] = self.keep_days * 86_400
        if self.keep_optimizer:
            given["optimizer"] = {"last": self.keep_optimizer}
        given = {name: value for name, value in given.items() if value is not None}
        return Keep(**given) if given else None


@feature.panel("run", "preview.html", order=20, query=PreviewQuery)
def preview_panel(ask: Ask, run: Run) -> dict[str, Any]:
    """Show the effect of rules on the run without applying them."""
    query = ask.query(PreviewQuery)
    preview = saved = None
    if query.keep is not None:
        retention = Retention.from_dict(query.keep.document())
        preview = ask.find(plan_run, run.id, run.key, retention, ask.now).preview
    if query.below_step is not None:
        saved = ask.find(tensor_bytes, run.id, ask.visible, below_step=query.below_step)
    return {"query": query, "preview": preview, "tensor_bytes": saved}
