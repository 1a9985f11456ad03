"""safetensors files, and folders of them as model hubs have them."""

from __future__ import annotations

import re
from typing import Final

from dcp.storage.formats.format import Format, Target

__all__ = ["SAFETENSORS", "WEIGHT_MAP_NAME"]

WEIGHT_MAP_NAME: Final = "model.safetensors.index.json"
"""What says of a folder of several files which tensor is in which."""


SAFETENSORS: Final = Format(
    name="safetensors",
    suffixes=(".safetensors",),
    begins=lambda begin: begin[7:9] == b"\0{",  # the length of a header, and its first byte
    folder_files=re.compile(r".*\.safetensors(\.index\.json)?", re.DOTALL),
    folder_marks=re.compile(
        r"model\.safetensors|.*\.safetensors\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL
    ),
    precedence=1,
    read_file="dcp.storage.formats.safetensors.file:index_of_safetensors_file",
    read_folder="dcp.storage.formats.opening.weights_folder:index_of_safetensors_folder",
    complete="dcp.conversion.targets.safetensors:with_extras",
    is_loose=True,
    target=Target(
        name="safetensors",
        layout="dcp.conversion.targets.safetensors:lay_out",
        as_file="by name",
        last_file=WEIGHT_MAP_NAME,
    ),
)
