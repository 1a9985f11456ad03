"""Parameters that several kinds of jobs have in common."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import Field

from dcp.server.catalog.inputs import MAX_ID, OneLine, Request

__all__ = ["CheckpointId", "Globs", "Parameters", "PlainText"]


class Parameters(Request):
    """Parameters of a job."""

    def digest(self) -> str:
        """A digest of the parameters, for keys of jobs of which one at a time is unfinished."""
        document = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:40]


CheckpointId = Annotated[int, Field(ge=1, le=MAX_ID)]

PlainText = Annotated[OneLine, Field(min_length=1, max_length=1024)]

Globs = Annotated[tuple[PlainText, ...], Field(min_length=1, max_length=256, strict=False)]
"""Shell globs on the names of tensors and values, as for `dcp.load`."""
