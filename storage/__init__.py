"""Storage layer: `stores` move bytes, `formats` parse and write checkpoints, `torch_storage` implements
torch's interfaces.

Replaces ``torch.distributed.checkpoint.storage``. torch's interfaces are imported on first use;
`dcp.storage.formats` and `dcp.storage.stores` work without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader as StorageReader
    from torch.distributed.checkpoint.storage import StorageWriter as StorageWriter
    from torch.distributed.checkpoint.storage import WriteResult as WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]

if not TYPE_CHECKING:  # type checkers would accept any misspelled name

    def __getattr__(name: str) -> object:
        if name in __all__:
            from torch.distributed.checkpoint import storage

            return getattr(storage, name)
        raise AttributeError(f"module 'dcp.storage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
