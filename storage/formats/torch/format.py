"""torch.save files, and folders of them as model hubs have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dcp.storage.formats.format import Format, Target

if TYPE_CHECKING:
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.stores.base import Store

__all__ = ["TORCH_SAVE"]

_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
"""How files of torch before 1.6 begin."""


def _read_file(read: Callable[[int, int], bytes], size_bytes: int, name: str) -> CheckpointIndex:
    from dcp.storage.formats.torch.file import index_of_torch_file

    return index_of_torch_file(read, size_bytes, name)


def _read_folder(store: Store) -> CheckpointIndex | None:
    from dcp.storage.formats.weights_folder import index_of_weights

    return index_of_weights(store, ".bin", "pytorch_model.bin", takes_all=False)


TORCH_SAVE: Final = Format(
    name="torch_save",
    suffixes=(".pt", ".pth", ".bin", ".ckpt", ".torch"),
    vague_suffixes=(".bin",),
    begins=lambda begin: begin.startswith((_ZIP, _PICKLE)),
    names_suffice=False,
    folder_files=re.compile(r".*\.bin(\.index\.json)?", re.DOTALL),
    folder_marks=re.compile(
        r"pytorch_model\.bin|.*\.bin\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.bin", re.DOTALL
    ),
    read_file=_read_file,
    read_folder=_read_folder,
    target=Target(name="torch", layout="dcp.conversion.targets.torch_save:lay_out", as_file="always"),
)
