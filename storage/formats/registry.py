"""Format registry: built-in formats and formats of other packages.

Other formats come from `register_format` or the entry point group `dcphub.formats`, named after the format.
Entry points are loaded only for places without a commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from dcp.storage.errors import OptionError, UnsupportedFormatError
from dcp.storage.extensions import extension_names, loaded_extension
from dcp.storage.formats.format import Format, Target

DCP: Final = Format(
    name="dcp",
    has_commit=True,
    data_files=re.compile(r"__.*\.distcp", re.DOTALL),
    target=Target(name="dcp", layout="dcp.conversion.targets.dcp:lay_out"),
)


_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
"""First bytes of files of torch before 1.6."""


TORCH_SAVE: Final = Format(
    name="torch_save",
    suffixes=(".pt", ".pth", ".bin", ".ckpt", ".torch"),
    vague_suffixes=(".bin",),
    begins=lambda begin: begin.startswith((_ZIP, _PICKLE)),
    names_suffice=False,
    takes_the_rest=True,  # recognizes older formats
    folder_files=re.compile(r".*\.bin(\.index\.json)?", re.DOTALL),
    folder_marks=re.compile(
        r"pytorch_model\.bin|.*\.bin\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.bin", re.DOTALL
    ),
    read_file="dcp.storage.formats.torch.structure:index_of_torch_file",
    read_folder="dcp.storage.formats.weights_folder:index_of_bin_folder",
    target=Target(name="torch", layout="dcp.conversion.targets.torch_save:lay_out", as_file="always"),
)
TORCH_DCP: Final = Format(
    name="torch_dcp",
    has_commit=True,
    data_files=re.compile(r"__.*\.distcp|.*\.safetensors", re.DOTALL),
    is_loose=True,
)


WEIGHT_MAP_NAME: Final = "model.safetensors.index.json"
"""File that maps tensors to the files of a folder."""


SAFETENSORS: Final = Format(
    name="safetensors",
    suffixes=(".safetensors",),
    begins=lambda begin: begin[7:9] == b"\0{",  # the length of a header, and its first byte
    folder_files=re.compile(r".*\.safetensors(\.index\.json)?", re.DOTALL),
    folder_marks=re.compile(
        r"model\.safetensors|.*\.safetensors\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL
    ),
    precedence=1,
    read_file="dcp.storage.formats.safetensors:index_of_safetensors_file",
    read_folder="dcp.storage.formats.weights_folder:index_of_safetensors_folder",
    complete="dcp.storage.formats.safetensors_extras:with_extras",
    is_loose=True,
    target=Target(
        name="safetensors",
        layout="dcp.conversion.targets.safetensors:lay_out",
        as_file="by name",
        last_file=WEIGHT_MAP_NAME,
    ),
)


GROUP: Final = "dcphub.formats"

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,15}")
_FLAGS: Final = re.UNICODE | re.IGNORECASE | re.DOTALL
_OURS: Final = (DCP, TORCH_DCP, TORCH_SAVE, SAFETENSORS)
_FORMATS: Final = {one.name: one for one in _OURS}


def register_format(one: Format) -> None:
    """Register a format in this process for reading, listing and conversion. The last registration of a
    name wins.

    Raises:
        UnsupportedFormatError: For an invalid or built-in name, a taken target name, and patterns that
            match no file or every file.
        OptionError: If ``one`` is not a `Format`, or suffixes are not a tuple.
    """
    if not isinstance(one, Format):
        raise OptionError(f"register_format() needs a Format, not a {type(one).__name__}: {one!r:.200}")
    if not (isinstance(one.suffixes, tuple) and isinstance(one.vague_suffixes, tuple)):
        raise OptionError(f"suffixes of the format {one.name!r} must be tuples of strings, such as ('.npy',)")
    taken = {other.target.name for other in _FORMATS.values() if other.target and other.name != one.name}
    if one.name in (ours.name for ours in _OURS) or not _NAME.fullmatch(one.name):
        raise UnsupportedFormatError(
            f"the format name {one.name!r} is built in or invalid: a name has up to 16 lower-case letters, "
            "digits and underscores"
        )
    if one.target is not None and one.target.name in taken:
        raise UnsupportedFormatError(
            f"the format {one.name!r} cannot write {one.target.name!r}, the target of another format"
        )
    for pattern in filter(None, (one.folder_files, one.folder_marks)):
        _refuse_apart(one.name, pattern)
    for suffix in one.suffixes:
        if not suffix or suffix != suffix.lower():
            raise UnsupportedFormatError(
                f"the suffix {suffix!r} of the format {one.name!r} must be non-empty and in lower case"
            )
    _FORMATS[one.name] = one
    file_names.cache_clear()


def _refuse_apart(name: str, pattern: re.Pattern[str]) -> None:
    """Raise UnsupportedFormatError for a pattern with flags that `_scoped` cannot combine with others."""
    try:
        is_fine = not pattern.flags & ~_FLAGS and bool(re.compile(_scoped(pattern)))
    except re.error:  # such as flags inside the pattern
        is_fine = False
    if not is_fine:
        raise UnsupportedFormatError(
            f"the pattern {pattern.pattern!r} of the format {name!r} may have only the flags re.IGNORECASE "
            "and re.DOTALL, passed to re.compile()"
        )


def formats() -> list[Format]:
    """Return all formats: built-in first, then in the order of registration."""
    _load_extensions()
    return list(_FORMATS.values())


@cache
def _load_extensions() -> None:
    for name in extension_names(GROUP):
        found = loaded_extension(GROUP, name)
        if not isinstance(found, Format) or found.name != name:
            raise UnsupportedFormatError(
                f"the entry point {name} of the group {GROUP} must be a Format with the name {name!r}, not "
                f"{found!r:.200}: fix or uninstall its package"
            )
        if name not in _FORMATS:  # a registration by the program has precedence
            register_format(found)


def format_of(name: str) -> Format | None:
    """Return the format of an index's name; None if not registered."""
    if name not in _FORMATS:
        _load_extensions()
    return _FORMATS.get(name)


def format_names() -> list[str]:
    """Return the names of all formats."""
    return [one.name for one in formats()]


def is_of_files(name: str) -> bool:
    """Return True if checkpoints of the format ``name`` are files without a commit object."""
    found = format_of(name)
    return found is not None and not found.has_commit


def file_suffixes() -> tuple[str, ...]:
    """Return the suffixes of checkpoint files."""
    return tuple(suffix for one in formats() for suffix in one.suffixes)


@dataclass(frozen=True, slots=True)
class FileNames:
    """Name patterns of all formats, for callers with many names.

    ``in_folders`` and ``mark_folders`` are as `Format.is_in_folder` and `Format.marks_folder`.
    """

    singles: tuple[str, ...]
    in_folders: re.Pattern[str]
    mark_folders: re.Pattern[str]

    def is_single(self, name: str) -> bool:
        """Return True if a file of this name counts as a checkpoint among other files."""
        return name.lower().endswith(self.singles)


@cache
def file_names() -> FileNames:
    """Return the name patterns of the present formats."""
    some = formats()
    files = [one.folder_files for one in some if one.folder_files is not None]
    marks = [one.folder_marks or one.folder_files for one in some if one.folder_files is not None]
    singles = (suffix for one in some for suffix in one.suffixes if suffix not in one.vague_suffixes)
    return FileNames(tuple(singles), _any_of(files), _any_of(marks))


def _any_of(patterns: Iterable[re.Pattern[str] | None]) -> re.Pattern[str]:
    return re.compile("|".join(_scoped(one) for one in patterns if one is not None))


def _scoped(pattern: re.Pattern[str]) -> str:
    letters = ("i" if pattern.flags & re.IGNORECASE else "") + ("s" if pattern.flags & re.DOTALL else "")
    return f"(?{letters}:{pattern.pattern})"


def by_precedence(some: Iterable[Format]) -> list[Format]:
    """Return the formats in the order of precedence for a folder."""
    return sorted(some, key=lambda one: -one.precedence)


def targets() -> list[Target]:
    """Return the writable formats."""
    return [one.target for one in formats() if one.target is not None]


def target_names() -> list[str]:
    """Return the values of ``to`` for `dcp.convert`."""
    return [target.name for target in targets()]


def target_named(name: str) -> tuple[Format, Target]:
    """Return the format written as ``name``.

    Raises:
        OptionError: For an unknown name; the message lists all.
    """
    for some in (lambda: _OURS, formats):  # entry points are loaded only for other names
        for one in some():
            if one.target is not None and one.target.name == name:
                return one, one.target
    from dcp.storage.near_names import close_to  # a slow import, only for errors

    close = close_to(name, target_names()) if isinstance(name, str) else ()
    meant = f". Did you mean {close[0]!r}?" if close else ""
    raise OptionError(f"to must be one of {', '.join(target_names())}, not {name!r}{meant}")
