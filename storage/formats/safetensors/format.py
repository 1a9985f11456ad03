"""safetensors files, and folders of them as model hubs have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dcp.storage.formats.format import Format, Target

if TYPE_CHECKING:
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.stores.base import Store

__all__ = ["SAFETENSORS", "WEIGHT_MAP_NAME"]

_SUFFIX: Final = ".safetensors"
_USUAL: Final = f"model{_SUFFIX}"

WEIGHT_MAP_NAME: Final = f"{_USUAL}.index.json"
"""What says of a folder of several files which tensor is in which."""


def _read_file(read: Callable[[int, int], bytes], size_bytes: int, name: str) -> CheckpointIndex:
    from dcp.storage.formats.safetensors.index import index_of_safetensors_file

    return index_of_safetensors_file(read, size_bytes, name)


def _read_folder(store: Store) -> CheckpointIndex | None:
    from dcp.storage.formats.weights_folder import index_of_weights

    return index_of_weights(store, _SUFFIX, _USUAL, takes_all=True)


SAFETENSORS: Final = Format(
    name="safetensors",
    suffixes=(_SUFFIX,),
    begins=lambda begin: begin[7:9] == b"\0{",  # the length of a header, and its first byte
    folder_files=re.compile(r".*\.safetensors(\.index\.json)?", re.DOTALL),
    folder_marks=re.compile(
        r"model\.safetensors|.*\.safetensors\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL
    ),
    precedence=1,
    read_file=_read_file,
    read_folder=_read_folder,
    complete="dcp.conversion.extras:with_extras",
    is_loose=True,
    target=Target(
        name="safetensors",
        layout="dcp.conversion.targets.safetensors:lay_out",
        as_file="by name",
        last_file=WEIGHT_MAP_NAME,
    ),
)
