"""Roots: where checkpoints are found, when they were looked through, and what is wrong with one."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from dcp.server.core.http.dependencies import Author, Caller, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import FormDep
from dcp.server.features.roots import api
from dcp.server.features.scan.job import ScanParams

__all__ = ["router"]

router = pages_router()


@router.get("/roots", dependencies=READ)
def roots_page(request: Request, service: ServiceDep, caller: Caller) -> Response:
    """All of them, with their last scan."""
    found = api.list_all(service, caller)
    return page(request, "roots.html", twin="/api/v1/roots", roots=found.items)


@router.post("/roots/{root}/scan", dependencies=[requires("write")])
def scan_form(
    root: api.RootName, form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Look through it now."""
    job = submit_kind("scan", ScanParams(root=root), service, author, transact, Response())
    return RedirectResponse(f"/jobs/{job.id}", 303)
