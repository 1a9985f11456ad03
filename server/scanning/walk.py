"""Which checkpoints lie below a root: found by names, sizes and times alone; nothing is opened.

What a folder is:

- with a commit object it is a checkpoint;
- with data files of ours or of stock torch and no commit it is an incomplete one;
- with weights as model hubs lay them out (`model.safetensors`, an index, numbered shards) it is one, too;
- else its files that are named as single-file checkpoints are one each.

Whatever it is, its subfolders are looked at, because trainers keep steps in the folder of the last model.
The root itself is never a checkpoint, since it has no key. Hidden folders, symbolic links and names that no
key may have are passed over. `.bin` alone says too little: such a file counts in a folder of weights only.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from dcp.server.problems import UnprocessableError
from dcp.server.roots import MAX_KEY_CHARACTERS, Folder, Root, check_key
from dcp.server.scanning.facts import marks_of
from dcp.storage.errors import CheckpointNotFoundError
from dcp.storage.formats.manifest import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.open import is_commit_object
from dcp.storage.stores.base import FileInfo
from dcp.storage.stores.posix_files import storage_error

__all__ = ["Candidate", "Left", "classify", "walk"]

MAX_DEPTH: Final = 24

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@, -]{0,199}(?<!\.)")
_SINGLE: Final = re.compile(r".+\.(?:pt|pth|ckpt|torch|safetensors)", re.IGNORECASE | re.DOTALL)
_DATA_FILE: Final = re.compile(r".+\.distcp", re.DOTALL)
_WEIGHTS: Final = re.compile(
    r"model\.safetensors|pytorch_model\.bin|.*\.(?:safetensors|bin)\.index\.json"
    r"|.*-[0-9]{5}-of-[0-9]{5}\.(?:safetensors|bin)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a checkpoint. ``marks`` are the files that its fingerprint is of.

    kind: "commit" (a folder with a commit object), "weights" (a folder of weights), "file" (``key`` is the
    file), or "incomplete" (data without a commit; ``marks`` are all of it).
    """

    key: str
    kind: Literal["commit", "weights", "file", "incomplete"]
    marks: tuple[FileInfo, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """No further candidate will come whose run is ``run_key``: what is not found by now is not there.

    ``problem``: it could not be listed, so that nothing is known about what is not found.
    """

    run_key: str
    problem: str | None = None


def walk(root: Root, below: str = "") -> Iterator[Candidate | Left]:
    """Everything below ``below`` (a folder's key, or ""); each folder that may hold checkpoints is left once.

    Raises the store's errors: CheckpointNotFoundError if a local root is not there (its disk may be away, and
    then nothing has vanished).
    """
    if root.path is None:
        yield from _walk_listing(root, below)
        return
    path = root.url_of(below)
    if not os.path.isdir(path):  # noqa: PTH112 - beside os.scandir and os.stat, which take strings
        raise CheckpointNotFoundError(f"{path}: the root's folder is not there", path=path)
    yield from _walk_local(path, below, depth=below.count("/"))


def classify(key: str, files: Mapping[str, FileInfo]) -> list[Candidate]:
    """The candidates that a folder with these ``files`` is or has; the root (``key`` "") is none itself."""
    infos = list(files.values())
    commits = [info for info in infos if is_commit_object(info.name)]
    if key and commits:
        return [Candidate(key, "commit", tuple(marks_of(infos)))]
    if key and any(_DATA_FILE.fullmatch(info.name) for info in infos):
        return [Candidate(key, "incomplete", tuple(i for i in infos if _DATA_FILE.fullmatch(i.name)))]
    if key and any(_WEIGHTS.fullmatch(info.name) for info in infos):
        return [Candidate(key, "weights", tuple(marks_of(infos)))]
    prefix = f"{key}/" if key else ""
    return [
        Candidate(prefix + info.name, "file", (info,))
        for info in infos
        if _SINGLE.fullmatch(info.name) and _is_plain(info.name) and not info.name.startswith(".")
    ]


# -- local folders -------------------------------------------------------------------------------------------


def _walk_local(path: str, key: str, depth: int) -> Iterator[Candidate | Left]:
    try:
        files, folders = _listing(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if depth == 0 and not key:
            raise storage_error(error, "list", path) from error
        # One that may not be looked into must not keep the others from being found.
        yield Left(key, f"{type(error).__name__}: {os.strerror(error.errno or 0)}")
        return
    yield from classify(key, files)
    prefix = f"{key}/" if key else ""
    for name in folders:
        inner_key, inner = prefix + name, f"{path}/{name}"
        if len(inner_key) > MAX_KEY_CHARACTERS or depth >= MAX_DEPTH:
            continue
        marks = _commit_marks(inner)
        if not marks:
            yield from _walk_local(inner, inner_key, depth + 1)
            continue
        yield Candidate(inner_key, "commit", marks)
        if _may_have_folders(inner):
            yield from _walk_below(inner, inner_key, depth + 1)
    yield Left(key)


def _walk_below(path: str, key: str, depth: int) -> Iterator[Candidate | Left]:
    """What is in the subfolders of a checkpoint that is known to be one."""
    for found in _walk_local(path, key, depth):
        if isinstance(found, Left) or found.key != key:
            yield found


def _may_have_folders(path: str) -> bool:
    try:
        # Each subfolder links to its parent. File systems that do not count these say 1.
        return os.stat(path).st_nlink != 2  # noqa: PTH116 - one for each checkpoint
    except OSError:
        return False


def _commit_marks(folder: str) -> tuple[FileInfo, ...]:
    """The commit objects that nearly every checkpoint has, by two requests and no listing."""
    found = []
    for name in (METADATA_NAME, MANIFEST_NAME):
        try:
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)  # noqa: PTH116 - half of a scan's time
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append(FileInfo(name, status.st_size, status.st_mtime))
    return tuple(found)


def _listing(path: str) -> tuple[dict[str, FileInfo], list[str]]:
    files: dict[str, FileInfo] = {}
    folders: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                if not name.startswith(".") and _is_plain(name):
                    folders.append(name)
            elif _counts(name) and entry.is_file(follow_symlinks=False):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                files[name] = FileInfo(name, status.st_size, status.st_mtime)
    folders.sort()
    return dict(sorted(files.items())), folders


def _counts(name: str) -> bool:
    """Whether a file of this name says anything about what its folder is; others are not even asked for."""
    return (
        is_commit_object(name)
        or name.endswith((".distcp", ".index.json", ".bin"))
        or _SINGLE.fullmatch(name) is not None
    )


def _is_plain(name: str) -> bool:
    if _PLAIN_NAME.fullmatch(name):
        return True
    try:
        check_key(name)
    except UnprocessableError:
        return False
    return True


# -- object stores -------------------------------------------------------------------------------------------


def _walk_listing(root: Root, below: str) -> Iterator[Candidate | Left]:
    """By one listing, in an order in which all that is below a folder comes together."""
    runs: list[str] = []
    folders: Iterable[Folder] = root.walk(below)
    if root.url.startswith("memory://"):
        folders = sorted(folders, key=lambda folder: f"{folder.key}/")
    for folder in folders:
        while runs and not _is_in(folder.key, runs[-1]):
            yield Left(runs.pop())
        if any(part.startswith(".") for part in folder.key.split("/")) or folder.key.count("/") > MAX_DEPTH:
            continue
        for candidate in classify(folder.key, folder.files):
            run = candidate.key.rpartition("/")[0]
            if run not in runs:
                runs = sorted([*runs, run], key=len)
            yield candidate
    while runs:
        yield Left(runs.pop())


def _is_in(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")
