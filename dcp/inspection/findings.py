"""Findings of a verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dcp.storage.errors import CheckpointError, UnsupportedFormatError

ReportBytes = Callable[[int, int], None]
"""Called with (bytes done so far, bytes to do in all), from any thread, one call at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or that is worth a note (`is_note`).

    ``kind`` is "index", "missing-file", "file-size", "stray-file", "checksum", "record", "unreadable",
    "metadata", "digest": another tensor than the manifest's digest tells, or than the checkpoint has that it
    was compared with, or "unsupported": written by a newer version, and not known to be damaged. ``offset``
    and ``length`` (bytes) say where in the file, ``fqn`` whose bytes they are.
    """

    kind: str
    message: str
    file: str | None = None
    fqn: str | None = None
    offset: int | None = None
    length: int | None = None

    @property
    def is_note(self) -> bool:
        """Return whether the checkpoint loads as it was committed all the same: a file that it does not refer
        to.

        A save that is killed leaves such, and a power cut brings back what was deleted right before it.
        """
        return self.kind == "stray-file"


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`. ``unchecked_bytes`` were read, but their format records no checksum.

    ``digest`` is of all tensors, as `dcp digest` has it, where nothing is wrong and it was asked for.
    """

    url: str
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    blocks: int = 0
    bytes: int = 0
    unchecked_bytes: int = 0
    digest: str | None = None

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong; there may be notes."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        """The findings that are no notes."""
        return [found for found in self.findings if not found.is_note]


def kind_of(error: CheckpointError, otherwise: str) -> str:
    """Return the kind of a finding: what a newer version wrote is kept apart from damage of the kind
    ``otherwise``."""
    return "unsupported" if isinstance(error, UnsupportedFormatError) else otherwise
