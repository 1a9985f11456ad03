"""Formats as data and a few functions: all that the rest of the package knows of one.

A format is recognized by names, by how a file begins, or by the names in a folder; it is read into a
`CheckpointIndex`; and if it can be written, its `Target` says how. To declare one costs no import of what
reads it: ours say where that is found.
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
"""Of a file's first bytes, as many as are looked at to tell its format; fewer where it has fewer."""

ReadFile: TypeAlias = "Callable[[Callable[[int, int], bytes], int, str], CheckpointIndex]"
"""The index of a file: of ``read(offset, length)``, its size in bytes and its name."""


def found(place: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, or the one that is at "module:name"."""
    function: Callable[..., Any] = resolve_name(place) if isinstance(place, str) else place
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The way in which a format is written: `dcp.convert(to=name)`, ``dcp convert --to NAME``, jobs of the
    service.

    ``as_file``: whether a target is one file, a folder, or the one if it is named as a file of the format.
    ``layout`` is a function of a `dcp.conversion.targets.job.LayoutJob` that returns the `Planned` target, or
    where it is found: "module:name". ``last_file`` is what makes a folder of several files complete, written
    when they are.
    """

    name: str
    layout: str | Callable[..., Any]
    as_file: Literal["always", "by name", "never"] = "never"
    last_file: str | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Format:
    """A format of checkpoints, by the ``name`` that its indexes have: at most 16 of a-z, 0-9 and ``_``.

    Recognized by:

    - ``suffixes``: how names of single files end, in lower case. ``vague_suffixes`` are those of them that
      say too little to take a file among others for a checkpoint, as ``.bin`` does.
    - ``begins``: whether a file that begins so (`BEGIN_BYTES` at most) is of this format. ``names_suffice``:
      a file with one of the suffixes is taken for one however it begins, and reading it says what is wrong.
      ``takes_the_rest``: it reads what is of no format that is known, since it tells best what that is.
    - ``folder_files``: a pattern of the names of files which are one checkpoint together, with the rest of
      the folder; and ``folder_marks``: of those that say so for sure (None: any of them does).
    - ``precedence``: of two formats that a folder has files of, the one with more counts.

    Read by ``read_file`` (a single file) and ``read_folder`` (None if there is nothing of it there), which
    are functions, or where they are found: "module:name". ``complete`` adds to an index what takes more
    reading, such as values that are no tensors: see `dcp.storage.formats.opening.complete_index`.
    ``has_commit``: a commit object makes it a checkpoint, and `dcp.storage.formats.opening` reads it;
    ``data_files`` are then those that go when it is replaced. ``is_loose``: files of a folder are replaced
    one by one, under names that stay.
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
        """Return whether a file is named as a single one of this format."""
        return name.lower().endswith(self.suffixes) if self.suffixes else False

    def is_in_folder(self, name: str) -> bool:
        """Return whether a file of this name is a part of a checkpoint that is a folder."""
        return self.folder_files is not None and self.folder_files.fullmatch(name) is not None

    def marks_folder(self, name: str) -> bool:
        """Return whether a file of this name says that its folder is a checkpoint."""
        marks = self.folder_marks or self.folder_files
        return marks is not None and marks.fullmatch(name) is not None

    def begins_so(self, begin: bytes) -> bool:
        """Return whether a file that begins with these bytes is of this format.

        Raises UnsupportedFormatError, which names the format, where it fails to say.
        """
        try:
            return self.begins is not None and self.begins(begin)
        except Exception as error:  # whatever another package's format does
            raise UnsupportedFormatError(
                f"the format {self.name!r} cannot tell whether a file is of it: "
                f"{type(error).__name__}: {error}. Mend its package, or uninstall it"
            ) from error
