"""Forms that convert and merge checkpoints, as jobs."""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError

from dcp.server.core.answers import IdPath
from dcp.server.core.http.dependencies import Author, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.tokens import Form, FormDep
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.convert.job import ConvertParams
from dcp.server.features.convert.merge import MergeParams

__all__ = ["router"]

router = pages_router()

_CHECKPOINT = "/checkpoints/{checkpoint_id}"
_CONVERT = [requires("convert")]
_PAGE: Final = re.compile(r"(?:[^?#]*/checkpoints/)?([0-9]{1,15})(?:[/?#].*)?", re.ASCII | re.DOTALL)


def _params(model: type[BaseModel], **given: Any) -> Any:
    try:
        return model(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UnprocessableError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None


@router.post(_CHECKPOINT + "/convert", dependencies=_CONVERT)
def convert_form(
    checkpoint_id: IdPath, form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Make it anew in another format, as a job."""
    params = _params(
        ConvertParams,
        checkpoint_id=checkpoint_id,
        to=form.text("to"),
        target_root=form.optional("target_root"),
        target_key=form.text("target_key"),
        dtype=form.optional("dtype"),
        map=form.optional("map"),
        inverse=form.is_checked("inverse"),
        below=form.optional("below"),
        drop_objects=form.is_checked("drop_objects"),
        exclude=form.all("exclude") or None,
    )
    job = submit_kind("convert", params, service, author, transact, Response())
    return RedirectResponse(f"/jobs/{job.id}", 303)


@router.post(_CHECKPOINT + "/merge", dependencies=_CONVERT)
def merge_form(
    checkpoint_id: IdPath, form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Add it and others up to a new one, as a job."""
    weights = [_number("weights", one) for one in _listed(form, "weights")] or None
    sources = [checkpoint_id, *map(_checkpoint_of, _listed(form, "with"))]
    params = _merged(form, sources=sources, weights=weights, formula=form.optional("formula"))
    job = submit_kind("merge", params, service, author, transact, Response())
    return RedirectResponse(f"/jobs/{job.id}", 303)


@router.post("/runs/{run_id}/merge", dependencies=_CONVERT)
def average_form(
    run_id: IdPath, form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Average the newest steps of a run, as a job."""
    last, decay = _number("last", form.text("last")), form.optional("decay")
    if not last.is_integer():
        raise UnprocessableError("last: a whole number of steps", field="last")
    params = _merged(form, run_id=run_id, last=int(last), decay=decay and _number("decay", decay))
    job = submit_kind("merge", params, service, author, transact, Response())
    return RedirectResponse(f"/jobs/{job.id}", 303)


def _merged(form: Form, **sources: Any) -> Any:
    return _params(
        MergeParams,
        **sources,
        to=form.text("to"),
        target_root=form.optional("target_root"),
        target_key=form.text("target_key"),
        dtype=form.optional("dtype"),
        accumulate=form.optional("accumulate"),
        drop_objects=form.is_checked("drop_objects"),
        exclude=_listed(form, "leave_out") or None,
    )


def _listed(form: Form, name: str) -> list[str]:
    """What is between commas."""
    return [part.strip() for part in form.text(name).split(",") if part.strip()]


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnprocessableError(f"{what}: {text[:100]!r} is no number", field=what) from None


def _checkpoint_of(text: str) -> int:
    """Of a checkpoint, or of the address of its page."""
    match = _PAGE.fullmatch(text)
    if match is None:
        raise UnprocessableError(
            f"{text[:100]!r} is neither the number of a checkpoint nor the address of its page", field="with"
        )
    return int(match[1])
