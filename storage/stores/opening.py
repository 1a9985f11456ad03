"""Stores made with storage options, which travel with whoever makes them and are never shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from dcp.storage.errors import OptionError
from dcp.storage.stores import open_store
from dcp.storage.stores.base import Store
from dcp.storage.stores.names import place_text

__all__ = ["OpenWith", "check_storage_options"]

_MEMORY: Final = re.compile(r"memory://", re.IGNORECASE)
_LOCAL: Final = re.compile(r"file://|(?!.*://)", re.IGNORECASE | re.DOTALL)
_MOOT_LOCALLY: Final = frozenset({"auto_mkdir"})
"""Options of fsspec's local file system that say what a local store does anyway."""


class OpenWith:
    """`dcp.storage.stores.open_store` with ``storage_options``: what takes an ``open_store`` takes this.

    It can be pickled, and options are compared by value. Its repr has their names only, because their
    values are credentials. With ``through_fsspec``, ``memory://`` is fsspec's own file system of that
    name, as for `torch.distributed.checkpoint.FsspecReader`, and not `MemoryStore`.
    """

    def __init__(
        self, storage_options: Mapping[str, Any] | None = None, *, through_fsspec: bool = False
    ) -> None:
        check_storage_options(storage_options)
        self.storage_options: dict[str, Any] = dict(storage_options or {})
        self.through_fsspec = through_fsspec

    def __call__(self, checkpoint_id: str | os.PathLike[str]) -> Store:
        """The store of a path or URL; nothing is touched. Raises what `open_store` raises."""
        options, text = self.storage_options, place_text(checkpoint_id)
        if self.through_fsspec:
            if _MEMORY.match(text):
                from dcp.storage.stores.objects.filesystem import FsspecStore

                return FsspecStore(text, options)
            if _LOCAL.match(text):
                options = {name: value for name, value in options.items() if name not in _MOOT_LOCALLY}
        return open_store(checkpoint_id, options or None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenWith) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((frozenset(self.storage_options), self.through_fsspec))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(map(str, self.storage_options)))})"


def check_storage_options(storage_options: object) -> None:
    """Raise TypeError, which shows no value, for what cannot be storage options."""
    if storage_options is None:
        return
    if not isinstance(storage_options, Mapping) or any(type(name) is not str for name in storage_options):
        raise OptionError(
            "storage_options must map names of options to their values, not be a "
            f"{type(storage_options).__name__}"
        )
