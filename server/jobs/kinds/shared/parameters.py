"""What the parameters of several kinds have in common."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dcp.server.schemas.common import MAX_ID, is_clean

__all__ = ["CheckpointId", "Globs", "Parameters", "PlainText"]


class Parameters(BaseModel):
    """Parameters of a job. Unknown members and numbers in quotes are refused, since they are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def digest(self) -> str:
        """The same for the same parameters: what tells jobs apart that there is to be one of at a time."""
        document = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:40]


def _clean(text: str) -> str:
    if not is_clean(text):
        raise ValueError("control characters are not allowed")
    return text


CheckpointId = Annotated[int, Field(ge=1, le=MAX_ID)]

PlainText = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_clean)]

Globs = Annotated[tuple[PlainText, ...], Field(min_length=1, max_length=256, strict=False)]
"""Shell globs on the names of tensors and values, as for `dcp.load`."""
