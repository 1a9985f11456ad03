"""Walk over a root: find checkpoints by names, sizes, and times; open no file.

Kinds of folders:

- a folder with a commit object is a checkpoint;
- a folder with data files of dcp or stock torch but no commit is an incomplete checkpoint;
- a folder with marker files of a format, such as weights of model hubs (`model.safetensors`, an index,
  numbered shards), is a checkpoint;
- in other folders, each file named like a single-file checkpoint is a checkpoint.

Subfolders are always walked, because trainers store steps below the last model. The root is never a
checkpoint, since its key would be empty. Hidden folders are skipped; names invalid as keys are reported as
passed over. Links are followed within the root only, as in the cache of a model hub; targets found by the
walk anyway are not found again by a link. `.bin` files count in folders of weights only.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self, TypeAlias

from dcp.server.catalog.source_facts import marks_of
from dcp.server.core.roots import MAX_KEY_CHARACTERS, StorageRoot, fault_of_key
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import CheckpointNotFoundError
from dcp.storage.formats.registry import file_names
from dcp.storage.stores.base import FileInfo
from dcp.storage.stores.posix.files import is_below, storage_error

MAX_DEPTH: Final = 24

_TOO_LONG: Final = f"keys of more than {MAX_KEY_CHARACTERS} characters"
_TOO_DEEP: Final = f"more than {MAX_DEPTH} folders deep"
_NOWHERE: Final = "broken links"
_CIRCLE: Final = "circular links"
_OUT: Final = "links out of the root, which are not followed"

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@, -]{0,199}(?<!\.)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Possible checkpoint. ``marks``: files of its fingerprint.

    kind: "commit" (folder with a commit object), "weights" (folder of weights), "file" (``key`` is the file),
    or "incomplete" (data without a commit; ``marks`` are all files).
    """

    key: str
    kind: Literal["commit", "weights", "file", "incomplete"]
    marks: tuple[FileInfo, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """End of a run: no further candidate of ``run_key`` follows.

    ``problem``: the run was not listed, so missing checkpoints are unknown.
    """

    run_key: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Skipped file or folder, and ``why``, in words shared by several; ``key`` can be invalid. ``hides``: the
    state of checkpoints at or below this key is unknown."""

    key: str
    why: str
    hides: bool = False


WalkResult: TypeAlias = Candidate | Left | PassedOver


def walk(root: StorageRoot, below: str = "") -> Iterator[WalkResult]:
    """Walk ``below`` (a folder's key, or ""). Each folder of possible checkpoints ends with a `Left`.

    Raises errors of the store: CheckpointNotFoundError for a missing local root (possibly an unmounted disk;
    nothing has vanished then).
    """
    if root.path is None:
        yield from _walk_listing(root, below)
        return
    path = root.url_of(below)
    if not os.path.isdir(path):  # noqa: PTH112 - beside os.scandir and os.stat, which take strings
        raise CheckpointNotFoundError(f"{path}: the root's folder does not exist", path=path)
    yield from _FolderWalk(root.url_of("")).walk(path, below, below.count("/"))


def classify(key: str, files: Mapping[str, FileInfo]) -> list[Candidate]:
    """Return the candidates in a folder with these ``files``; none for the root (``key`` "")."""
    infos = list(files.values())
    commits = [info for info in infos if is_commit_object(info.name)]
    if key and commits:
        return [Candidate(key, "commit", tuple(marks_of(infos)))]
    if key and any(_is_data_file(info.name) for info in infos):
        return [Candidate(key, "incomplete", tuple(info for info in infos if _is_data_file(info.name)))]
    if key and any(file_names().mark_folders.fullmatch(info.name) for info in infos):
        return [Candidate(key, "weights", tuple(marks_of(infos)))]
    prefix = f"{key}/" if key else ""
    singles = [info for info in infos if file_names().is_single(info.name) and not info.name.startswith(".")]
    return [
        Candidate(prefix + info.name, "file", (info,)) for info in singles if _fault_of(info.name) is None
    ]


# -- local folders -------------------------------------------------------------------------------------------


class _FolderWalk:
    """Walk over the root at ``base``."""

    def __init__(self, base: str) -> None:
        self._base = os.path.realpath(base)
        self._entered: set[tuple[int, int]] = set()

    def walk(self, path: str, key: str, depth: int, *, linked: bool = False) -> Iterator[WalkResult]:
        """Walk the folder ``path`` and all folders below, under its ``key``.

        ``linked``: the folder is reachable by a link only. Such folders are walked once, to avoid cycles.
        """
        if linked and not self._enter(path):
            return
        try:
            listing = self._listing(path)
        except FileNotFoundError:
            return
        except OSError as error:
            if depth == 0 and not key:
                raise storage_error(error, "list", path) from error
            # An unlistable folder must not hide the others.
            yield Left(key, f"{type(error).__name__}: {os.strerror(error.errno or 0)}")
            return
        prefix = f"{key}/" if key else ""
        for one in classify(key, listing.files):
            if one.kind != "file" or one.marks[0].name not in listing.found_anyway:
                yield one
        for passed in listing.passed_over:
            yield PassedOver(prefix + passed.key, passed.why, passed.hides)
        for name, inner, is_link in listing.folders:
            yield from self._walk_into(inner, prefix + name, depth, linked=linked or is_link)
        yield Left(key)

    def _walk_into(self, path: str, key: str, depth: int, *, linked: bool) -> Iterator[WalkResult]:
        if len(key) > MAX_KEY_CHARACTERS:
            yield PassedOver(key, _TOO_LONG)
        elif depth >= MAX_DEPTH:
            yield PassedOver(key, _TOO_DEEP)
        elif not linked and (marks := _commit_marks(path)):
            yield Candidate(key, "commit", marks)
            if _may_have_folders(path):
                # except itself, a known checkpoint
                for found in self.walk(path, key, depth + 1):
                    if not isinstance(found, Candidate) or found.key != key:
                        yield found
        else:
            yield from self.walk(path, key, depth + 1, linked=linked)

    def _listing(self, path: str) -> _Listing:
        found = _Listing()
        with os.scandir(path) as entries:
            for entry in entries:
                name, counts = entry.name, _counts(entry.name)
                if entry.is_symlink():
                    self._follow(found, entry, counts)
                elif entry.is_dir(follow_symlinks=False):
                    if not name.startswith("."):
                        found.add_folder(name, entry.path)
                elif counts and entry.is_file(follow_symlinks=False):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    found.add_file(FileInfo(name, status.st_size, status.st_mtime))
        return found.in_order()

    def _follow(self, found: _Listing, entry: os.DirEntry[str], counts: bool) -> None:
        name = entry.name
        if name.startswith(".") and not counts:
            return
        real = os.path.realpath(entry.path)
        try:
            status = os.lstat(real)
        except OSError:
            found.passed_over.append(PassedOver(name, _NOWHERE))
            return
        is_folder, is_file = stat.S_ISDIR(status.st_mode), counts and stat.S_ISREG(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            found.passed_over.append(PassedOver(name, _CIRCLE))
        elif real == self._base or not (is_folder or is_file):
            return
        elif not is_below(real, self._base):
            found.passed_over.append(PassedOver(name, _OUT, hides=True))
        else:
            is_found_anyway = _is_found_anyway(os.path.relpath(real, self._base), is_file=not is_folder)
            if not is_folder:
                found.add_file(FileInfo(name, status.st_size, status.st_mtime), is_found_anyway)
            elif not is_found_anyway:
                found.add_folder(name, real, is_link=True)

    def _enter(self, path: str) -> bool:
        """Return True at the first visit of a folder behind a link."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        before = len(self._entered)
        self._entered.add((status.st_dev, status.st_ino))
        return len(self._entered) > before


@dataclass(slots=True)
class _Listing:
    """Relevant contents of a folder. Folders are (name, path, is a link); ``passed_over`` has names for
    keys."""

    files: dict[str, FileInfo] = field(default_factory=dict)
    folders: list[tuple[str, str, bool]] = field(default_factory=list)
    found_anyway: set[str] = field(default_factory=set)
    passed_over: list[PassedOver] = field(default_factory=list)

    def add_folder(self, name: str, path: str, *, is_link: bool = False) -> None:
        """Add a folder with a name valid for keys."""
        fault = _fault_of(name)
        if fault is None:
            self.folders.append((name, path, is_link))
        else:
            self.passed_over.append(PassedOver(name, fault))

    def add_file(self, info: FileInfo, is_found_anyway: bool = False) -> None:
        """Add a file. Single-file checkpoints need a name valid for keys."""
        fault = _fault_of(info.name) if file_names().is_single(info.name) else None
        if fault is None:
            self.files[info.name] = info
            if is_found_anyway:
                self.found_anyway.add(info.name)
        else:
            self.passed_over.append(PassedOver(info.name, fault))

    def in_order(self) -> Self:
        """Sort by name."""
        self.folders.sort()
        self.passed_over.sort(key=lambda passed: passed.key)
        self.files = dict(sorted(self.files.items()))
        return self


def _is_found_anyway(key: str, *, is_file: bool) -> bool:
    """Return True if the walk finds ``key``, a folder or single file, without a link."""
    folder, _, name = key.rpartition("/")
    if is_file and (not file_names().is_single(name) or name.startswith(".")):
        return False
    folders = folder.split("/") if is_file else key.split("/")
    return (
        len(key) <= MAX_KEY_CHARACTERS
        and len(folders) <= MAX_DEPTH
        and not any(part.startswith(".") for part in folders)
        and all(_fault_of(part) is None for part in key.split("/"))
    )


def _may_have_folders(path: str) -> bool:
    try:
        # Each subfolder links to its parent. File systems without this count report 1.
        return os.stat(path).st_nlink != 2  # noqa: PTH116 - one per checkpoint
    except OSError:
        return False


def _commit_marks(folder: str) -> tuple[FileInfo, ...]:
    """Find the usual commit objects by two requests, without a listing."""
    found = []
    for name in (METADATA_NAME, MANIFEST_NAME):
        try:
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)  # noqa: PTH116 - half of a scan's time
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append(FileInfo(name, status.st_size, status.st_mtime))
    return tuple(found)


def _counts(name: str) -> bool:
    """Return True if a file of this name is relevant for its folder; other files are skipped."""
    return (
        is_commit_object(name)
        or name.endswith(DATA_SUFFIX)
        or file_names().is_single(name)
        or file_names().in_folders.fullmatch(name) is not None
    )


def _is_data_file(name: str) -> bool:
    return name.endswith(DATA_SUFFIX)


def _fault_of(name: str) -> str | None:
    """Return the reason why this part is invalid in keys, or None."""
    if _PLAIN_NAME.fullmatch(name):
        return None
    fault = fault_of_key(name)
    return None if fault is None else f"names invalid as keys: {fault}"


# -- object stores -------------------------------------------------------------------------------------------


def _walk_listing(root: StorageRoot, below: str) -> Iterator[WalkResult]:
    """Walk by one listing, in an order that groups the contents of each folder."""
    runs: list[str] = []
    for folder in root.walk(below):
        while runs and not is_in(folder.key, runs[-1]):
            yield Left(runs.pop())
        parts = folder.key.split("/") if folder.key else []
        if any(part.startswith(".") for part in parts):
            continue
        why = _why_not(folder.key, parts)
        if why is not None:
            if any(_counts(name) for name in folder.files):
                yield PassedOver(folder.key, why)
            continue
        for candidate in classify(folder.key, folder.files):
            run = candidate.key.rpartition("/")[0]
            if run not in runs:
                runs = sorted([*runs, run], key=len)
            yield candidate
    while runs:
        yield Left(runs.pop())


def _why_not(key: str, parts: Sequence[str]) -> str | None:
    if len(key) > MAX_KEY_CHARACTERS:
        return _TOO_LONG
    if len(parts) > MAX_DEPTH:
        return _TOO_DEEP
    return next((fault for fault in map(_fault_of, parts) if fault is not None), None)


def is_in(key: str, folder: str) -> bool:
    """Return True if ``key`` is ``folder`` or below; "" is the root."""
    return not folder or key == folder or key.startswith(f"{folder}/")
