"""A read-only store: checkpoints in a zip archive.

``zip:///data/runs.zip`` is the archive, ``zip:///data/runs.zip/run/step-1`` a folder inside the archive.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from dcp.storage.stores import Capabilities, FileInfo, ReadHandle, ReadOnlyStore, StoreType, check_name

_URL = re.compile(r"zip://(?P<archive>/.*?\.zip)(?:/(?P<folder>.*))?", re.DOTALL | re.IGNORECASE)


class ZipStore(ReadOnlyStore):
    """A folder of a zip archive. Uncompressed members are read fastest."""

    capabilities = Capabilities(is_writable=False, lists_folders=True, lists_tree=True)

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url.rstrip("/"))
        if match is None:
            raise StorageError(
                f"{url!r} is not the URL of an archive: use zip:///absolute/path.zip", path=url, op="open"
            )
        self.url = match[0]
        self._archive = Path(match["archive"])
        self._prefix = f"{match['folder']}/" if match["folder"] else ""

    def list(self) -> list[FileInfo]:
        """Return the files of this folder, sorted by name."""
        return sorted((info for folder, info in self.tree() if not folder), key=lambda info: info.name)

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield all files below this folder with the path of their folder."""
        if self._archive.exists():
            members = ZipFile(self._archive).infolist()
            for member in sorted(members, key=lambda member: member.filename):
                folder, _, name = member.filename.removeprefix(self._prefix).rpartition("/")
                if member.filename.startswith(self._prefix) and name:
                    seconds = time.mktime((*member.date_time, 0, 0, -1))
                    yield folder, FileInfo(name, member.file_size, seconds)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open the file ``name`` of this folder."""
        try:
            return _Member(ZipFile(self._archive), self._prefix + check_name(name), self.path_of(name))
        except (FileNotFoundError, KeyError):
            raise CheckpointNotFoundError(f"{self.path_of(name)} does not exist", path=self.url) from None


class _Member(ReadHandle):
    def __init__(self, archive: ZipFile, member: str, path: str) -> None:
        self.name, self.size_bytes, self._path = member, archive.getinfo(member).file_size, path
        self._archive, self._file, self._guard = archive, archive.open(member), threading.Lock()

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        try:
            with self._guard:  # threads share one file position
                self._file.seek(offset)
                for buffer in buffers:
                    if len(data := self._file.read(buffer.nbytes)) < buffer.nbytes:
                        raise CorruptCheckpointError(f"{self._path} is truncated", path=self._path)
                    buffer[:] = data
        except BadZipFile as error:
            raise CorruptCheckpointError(f"{self._path}: {error}", path=self._path) from error

    def close(self) -> None:
        self._file.close()
        self._archive.close()


STORE_TYPE = StoreType(schemes=("zip",), open=lambda url, options: ZipStore(url))
