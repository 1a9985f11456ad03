"""What was found out about the bytes of a checkpoint: verifications, and statistics of its values."""

from __future__ import annotations

from dcp.server.core.answers import Answer
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.records.contents import Statistics, Verification

__all__ = ["StatisticsAnswer", "VerificationAnswer", "VerificationList"]


@answers(Verification)
class VerificationAnswer(RecordAnswer):
    """One verification of a checkpoint."""


class VerificationList(Answer):
    """The verifications of a checkpoint, newest first."""

    items: list[VerificationAnswer]


@answers(Statistics)
class StatisticsAnswer(RecordAnswer):
    """Statistics of a checkpoint's values: of all tensors together, and of those of this page."""

    next_cursor: str | None
