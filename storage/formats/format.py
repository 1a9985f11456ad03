"""Format declarations: recognition, reading and writing of a checkpoint format.

A format is recognized by file names, first bytes or folder contents, read into a `CheckpointIndex`, and
optionally written as described by its `Target`. Readers are named as "module:name" and imported on first
use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dcp.storage.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.stores.base import Store

__all__ = ["BEGIN_BYTES", "Format", "ReadFile", "Target", "found"]

BEGIN_BYTES = 64
"""Number of first bytes that identify a format; fewer for short files."""

ReadFile: TypeAlias = "Callable[[Callable[[int, int], bytes], int, str], CheckpointIndex]"
"""Function that returns the index of a file from ``read(offset, length)``, the size in bytes and the name."""


def found(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return ``place`` if a function, or import "module:name"."""
    function: Callable[..., Any] = resolve_name(place) if isinstance(place, str) else place
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Writable format: `dcp.convert(to=name)`, ``dcp convert --to NAME``, jobs of the service.

    ``as_file``: a target is a file, a folder, or a file if named like one. ``layout`` is a function from a
    `dcp.conversion.targets.job.LayoutJob` to the `Planned` target, or "module:name". ``last_file``
    completes a folder of several files.
    """

    name: str
    layout: str | Callable[..., Any]
    as_file: Literal["always", "by name", "never"] = "never"
    last_file: str | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Format:
    """Checkpoint format with a ``name`` of at most 16 characters of a-z, 0-9 and ``_``.

    Recognition:

    - ``suffixes``: endings of single file names, in lower case. ``vague_suffixes``, such as ``.bin``, do not
      identify a checkpoint among other files.
    - ``begins``: function that recognizes the first `BEGIN_BYTES`. ``names_suffice``: the suffix alone
      decides, and reading reports errors. ``takes_the_rest``: reads files of unknown formats, for the best
      error message.
    - ``folder_files``: pattern of the files that form a checkpoint in a folder; ``folder_marks``: pattern of
      files that identify such a folder (None: any of them).
    - ``precedence``: the higher format wins in a folder with files of two formats.

    Reading: ``read_file`` (single file) and ``read_folder`` (None if not present), as functions or
    "module:name". ``complete`` adds values that need more reading: see
    `dcp.storage.formats.opening.complete_index`. ``has_commit``: a commit object makes the checkpoint, read
    by `dcp.storage.formats.opening`; ``data_files`` are removed on replacement. ``is_loose``: files are
    replaced one by one under stable names.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    vague_suffixes: tuple[str, ...] = ()
    begins: Callable[[bytes], bool] | None = None
    names_suffice: bool = True
    takes_the_rest: bool = False
    folder_files: re.Pattern[str] | None = None
    folder_marks: re.Pattern[str] | None = None
    precedence: int = 0
    read_file: str | ReadFile | None = None
    read_folder: str | Callable[[Store], CheckpointIndex | None] | None = None
    complete: str | Callable[[Store, CheckpointIndex], CheckpointIndex] | None = None
    has_commit: bool = False
    data_files: re.Pattern[str] | None = None
    is_loose: bool = False
    target: Target | None = None

    def has_suffix(self, name: str) -> bool:
        """Return True if the name is that of a single file of this format."""
        return name.lower().endswith(self.suffixes) if self.suffixes else False

    def is_in_folder(self, name: str) -> bool:
        """Return True if a file of this name is part of a folder checkpoint."""
        return self.folder_files is not None and self.folder_files.fullmatch(name) is not None

    def marks_folder(self, name: str) -> bool:
        """Return True if a file of this name identifies its folder as a checkpoint."""
        marks = self.folder_marks or self.folder_files
        return marks is not None and marks.fullmatch(name) is not None

    def begins_so(self, begin: bytes) -> bool:
        """Return True if a file with these first bytes has this format.

        Raises:
            UnsupportedFormatError: If the format's function fails.
        """
        try:
            return self.begins is not None and self.begins(begin)
        except Exception as error:  # raised by the format of another package
            raise UnsupportedFormatError(
                f"the format {self.name!r} failed to recognize a file: {type(error).__name__}: {error}. "
                "Fix or uninstall its package"
            ) from error
