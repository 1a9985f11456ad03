"""Bodies of answers: bytes of known number, any range of which is read in parts, front to back.

Nothing is held but a few parts. What checksums tell is compared before the last part is handed out, so that
a damaged source is an answer that breaks off, never one that is complete and wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Final

from dcp.storage.stores.base import Store

__all__ = ["PART_BYTES", "Body", "FileBody", "empty_part", "part_bytes_of"]

PART_BYTES: Final = 2 << 20
"""What is read, checked and sent at a time; three of them are alive at once."""

_REMOTE_PART_BYTES: Final = 8 << 20
"""Where requests are dear: pieces of it are fetched at once."""


class Body(ABC):
    """``size_bytes`` bytes. Every call of `parts` reads anew, so that a body may be asked by many."""

    size_bytes: int

    @abstractmethod
    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Bytes ``begin`` to ``end``, in order; close it to stop early. Raises errors of the storage.

        Parts belong to the caller: their memory is not used again.
        """


def empty_part(size: int) -> memoryview:
    """Memory for a part. Not zeroed, and of numpy, whose blocks the C library hands out again and again
    where new pages for each would cost a tenth of the time."""
    import numpy as np  # only here: a service is to answer soon after its start

    return np.empty(size, np.uint8).data


def part_bytes_of(store: Store) -> int:
    """The size of the parts of what comes out of ``store``."""
    return _REMOTE_PART_BYTES if store.read_profile.scatter else PART_BYTES


class FileBody(Body):
    """A file of a store as it is."""

    def __init__(self, store: Store, name: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._store = store
        self._name = name
        self._part_bytes = part_bytes_of(store)

    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Read as they are asked for; CorruptCheckpointError if the file has become shorter."""
        with self._store.open_read(self._name, expected_bytes=self.size_bytes) as handle:
            for at in range(begin, end, self._part_bytes):
                part = empty_part(min(self._part_bytes, end - at))
                handle.preadv([part], at)
                yield part
