"""For pages that helper D replaces: deleted when that is merged."""

from dcp.server.core.http.dependencies import MAX_PAGE
from dcp.server.core.inputs import Query
from dcp.server.features.checkpoints.web import CheckpointQuery

__all__ = ["MAX_PAGE", "CheckpointQuery", "Query"]
