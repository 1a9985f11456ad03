"""A target file for a caller that reads it front to back while it is made, in place of a sink."""

from __future__ import annotations

from dcp.conversion.copying.gather import RangeReader
from dcp.conversion.copying.tasks import Assembler, Task, TaskResult
from dcp.storage.closable import Closable
from dcp.storage.engine.reading.fragments import Fragment
from dcp.storage.stores.base import Store

__all__ = ["WindowReader"]


class WindowReader(Closable):
    """The bytes of ``task`` from its ``begin`` on. Use as a context manager; for one thread at a time."""

    def __init__(self, store: Store, task: Task, *, verify: bool) -> None:
        self.position = task.begin
        self._end = task.end
        self._reader = RangeReader(store, verify=verify)
        self._reader.begin(task.source_files)
        self._has_holes = bool(task.holes)
        self._result = TaskResult(task.number)
        self._assembler = Assembler(task, self._reader, self._result)

    def close(self) -> None:
        """Close the source's files."""
        self._reader.close()

    def fill(self, buffer: memoryview) -> None:
        """The next ``len(buffer)`` bytes; ValueError behind the end."""
        end = self.position + len(buffer)
        if end > self._end:
            raise ValueError(f"byte {end} is behind the end of the task, {self._end}")
        self._assembler.assemble(buffer, self.position, end)
        self.position = end
        if not self._has_holes:  # then nobody asks for the checksums of what was made
            self._reader.targets.clear()
            self._result.targets.clear()

    def take_sources(self) -> list[Fragment]:
        """Checksums of what was read since the last call; nobody else needs them."""
        found, self._reader.sources = self._reader.sources, []
        return found
