"""A service feature: a job that counts NaNs by layer, a page, and a POST for each new checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic import create_model

from dcp.server.catalog.events import CatalogEvent
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature, Link
from dcp.server.core.jobs.kind import JobContext, ReportProgress
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.jobs.subjects import CheckpointParams, SimpleKind, Subject, open_source, storage_errors


class NanKind(SimpleKind[CheckpointParams]):
    """Count the NaNs of one checkpoint."""

    name, scope, params = "nan_counts", "read", CheckpointParams
    button = "Count NaNs by layer"

    def run(
        self,
        context: JobContext,
        params: CheckpointParams,
        subjects: Sequence[Subject],
        report: ReportProgress,
    ) -> Mapping[str, Any]:
        """Sum the NaNs by layer, the part of a tensor's name before the last dot."""
        from dcp.inspection.values.statistics import statistics
        from dcp.inspection.values.tensor_reading import TensorReader

        root, source = open_source(context, subjects[0])
        nans: Counter[str] = Counter()
        with storage_errors(root), TensorReader(source.store, source.index, verify="full") as reader:
            found = statistics(reader, progress=lambda done, total: report(done))
        for tensor in found.tensors:
            nans[tensor.fqn.rpartition(".")[0]] += tensor.statistics.nans if tensor.statistics else 0
        return {"layers": dict(sorted(nans.items()))}


_PAGE = """{% extends "base.html" %}{% import "parts.html" as parts with context %}
{% block title %}NaNs{% endblock %}{% block content %}<h1>NaNs by layer</h1>
{% if layers is none %}{{ parts.empty("Not counted yet.") }}{% endif %}
<table class="rows"><tbody>{% for layer, nans in (layers or {}).items() %}
<tr><th scope="row">{{ layer }}</th><td class="num">{{ nans|count }}</td></tr>{% endfor %}</tbody></table>
{% endblock %}"""

_SETTINGS = create_model("NanSettings", url=(str, ""))
feature = Feature("nan_counts", __name__, [NanKind()], templates={"nans.html": _PAGE}, settings=_SETTINGS)
feature.links = [Link("checkpoint", "NaNs by layer", "/checkpoints/{id}/nans")]


@feature.page("/checkpoints/{checkpoint_id}/nans", "nans.html")
def nans_page(checkpoint_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Show the result of the last job."""
    job = ask.last_result(NanKind, CheckpointParams(checkpoint_id=checkpoint_id))
    return {"layers": ((job and job.result) or {}).get("layers")}


@feature.consumer("nan_counts", kinds=["checkpoint.committed"], is_slow=True)
def post(connection: None, events: Sequence[CatalogEvent], context: ScheduleContext) -> None:
    """Post the ids of new checkpoints to the configured URL. Errors are retried."""
    if url := feature.options(context.settings).url:
        body = {"checkpoints": [event.checkpoint_id for event in events]}
        httpx.post(url, json=body, timeout=10).raise_for_status()
