"""Forms and panels: convert a checkpoint, merge several, average the newest steps of a run."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

from dcp.planners.weight_maps.weight_map import ready_maps
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.jobs.kind import Parameters
from dcp.server.core.pages.requests import Form, FormDep, checked
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.convert import feature
from dcp.server.features.convert.conversion import ConvertKind
from dcp.server.features.convert.merge import MergeKind, MergeParams
from dcp.server.features.convert.options import ConvertParams
from dcp.server.features.roots import writable_roots
from dcp.server.records.checkpoints import CheckpointDetail, Run
from dcp.storage.formats.registry import target_names

M = TypeVar("M", bound=Parameters)

_PAGE: Final = re.compile(r"(?:[^?#]*/checkpoints/)?([0-9]{1,15})(?:[/?#].*)?", re.ASCII | re.DOTALL)


@feature.form("/checkpoints/{checkpoint_id}/convert", scope="convert")
def convert_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str:
    """Submit a job that converts the checkpoint."""
    params = _params(
        ConvertParams,
        form,
        checkpoint_id=checkpoint_id,
        map=form.optional("map"),
        inverse=form.is_checked("inverse"),
        below=form.optional("below"),
        exclude=form.all("exclude") or None,
    )
    return f"/jobs/{ask.submit(ConvertKind, params).id}"


@feature.form("/checkpoints/{checkpoint_id}/merge", scope="convert")
def merge_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str:
    """Submit a job that merges the checkpoint with others."""
    sources = [checkpoint_id, *map(_checkpoint_of, _listed(form, "with"))]
    weights = [_number("weights", one) for one in _listed(form, "weights")] or None
    return _merge(form, ask, sources=sources, weights=weights, formula=form.optional("formula"))


@feature.form("/runs/{run_id}/merge", scope="convert")
def average_form(run_id: IdPath, form: FormDep, ask: Ask) -> str:
    """Submit a job that averages the newest steps of a run."""
    last, decay = _number("last", form.text("last")), form.optional("decay")
    if not last.is_integer():
        raise UnprocessableError("last: must be a whole number of steps", field="last")
    return _merge(form, ask, run_id=run_id, last=int(last), decay=decay and _number("decay", decay))


def _merge(form: Form, ask: Ask, **sources: Any) -> str:
    accumulate, exclude = form.optional("accumulate"), _listed(form, "leave_out") or None
    params = _params(MergeParams, form, **sources, accumulate=accumulate, exclude=exclude)
    return f"/jobs/{ask.submit(MergeKind, params).id}"


def _params(model: type[M], form: Form, **given: Any) -> M:
    """Return the parameters of a form: the common fields, and ``given`` fields."""
    given |= {
        "to": form.text("to"),
        "target_root": form.optional("target_root"),
        "target_key": form.text("target_key"),
        "dtype": form.optional("dtype"),
        "drop_objects": form.is_checked("drop_objects"),
    }
    return checked(model, **{name: value for name, value in given.items() if value is not None})


def _listed(form: Form, name: str) -> list[str]:
    """Return the comma-separated values of a field."""
    return [part.strip() for part in form.text(name).split(",") if part.strip()]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnprocessableError(f"{name}: {text[:100]!r} is not a number", field=name) from None


def _checkpoint_of(text: str) -> int:
    """Return the id of a checkpoint from a number or the address of a page."""
    match = _PAGE.fullmatch(text)
    if match is None:
        raise UnprocessableError(
            f"{text[:100]!r} is neither a checkpoint id nor the address of a checkpoint page", field="with"
        )
    return int(match[1])


# -- conversions and merges on the pages of checkpoints and runs ---------------------------------------------


@feature.panel("checkpoint.actions", "actions.html", order=20)
def convert_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Offer conversion and merge if a root accepts the result."""
    return _targets(ask)


@feature.panel("run", "average.html", order=10)
def average_panel(ask: Ask, run: Run) -> dict[str, Any] | None:
    """Offer an average of the newest steps if a root accepts the result."""
    return _targets(ask) if run.checkpoint_count else None


def _targets(ask: Ask) -> dict[str, Any] | None:
    roots = [root for root in writable_roots(ask) if ask.caller.may("convert", root.name)]
    return {"roots": roots, "targets": target_names(), "maps": list(ready_maps())} if roots else None
