"""Pages in the application: their routes, and errors for those who see pages."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, FastAPI

from dcp.server.pages import assets
from dcp.server.pages.problems import problem_page
from dcp.server.pages.routes import (
    actions,
    anatomy,
    checkpoints,
    jobs,
    lineage,
    lists,
    overview,
    roots,
    runs,
    search,
    shards,
    sign_in,
)
from dcp.server.pages.routes.administration import audit, keys
from dcp.server.pages.routes.comparing import diff, will_it_load
from dcp.server.pages.routes.values import changes, layers, tensors

__all__ = ["ROUTERS", "install"]

ROUTERS: Final[tuple[APIRouter, ...]] = (
    actions.router,
    anatomy.router,
    assets.router,
    audit.router,
    changes.router,
    checkpoints.router,
    diff.router,
    search.router,
    jobs.router,
    keys.router,
    layers.router,
    lineage.router,
    lists.router,
    overview.router,
    roots.router,
    runs.router,
    shards.router,
    sign_in.router,
    tensors.router,
    will_it_load.router,
)
"""Before the welcome: ``/`` is a page for browsers alone."""


def install(app: FastAPI) -> None:
    """What the application asks of the pages beside their routes."""
    app.state.problem_page = problem_page
