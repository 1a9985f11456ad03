"""Whether a source is still the one that a conversion was planned for."""

from __future__ import annotations

import hashlib

from dcp.conversion.copying.tasks import TASK_BYTES, TASK_COPIES, WINDOW_BYTES
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.errors import CheckpointConflictError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.plain import encode_plain
from dcp.storage.stores.base import Store
from dcp.version import __version__

__all__ = ["SourceChangedError", "refuse_changed", "source_mark"]


class SourceChangedError(CheckpointConflictError):
    """The source is not what it was when the conversion was planned: it has to be converted anew."""


def source_mark(store: Store, index: CheckpointIndex, to: str) -> str:
    """Changes with the source's files, and with how this version converts to ``to``."""
    listing = {info.name: info for info in store.list()}
    facts = [
        (name, listing[name].size_bytes, listing[name].modified_seconds)
        for name in index.files
        if name in listing
    ]
    sizes = [TASK_BYTES, TASK_COPIES, WINDOW_BYTES]
    head = [__version__, store.url, to, *sizes, index.provenance.get("save_id"), facts]
    return hashlib.sha256(encode_plain(head, limit_bytes=1 << 30) or b"").hexdigest()


def refuse_changed(engine: ReadEngine, to: str, mark: str, name: str) -> None:
    """SourceChangedError unless ``mark`` is still the `source_mark` of the source of that ``name``."""
    if source_mark(engine.store, engine.index, to) != mark:
        raise SourceChangedError(f"{name} has changed while it was converted; convert it again", path=name)
