"""Stock torch's formats: its sharded checkpoints, torch.save files, and folders of them from model hubs."""

from __future__ import annotations

import re
from typing import Final

from dcp.storage.formats.format import Format, Target

__all__ = ["TORCH_DCP", "TORCH_SAVE"]

_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
"""How files of torch before 1.6 begin."""


TORCH_SAVE: Final = Format(
    name="torch_save",
    suffixes=(".pt", ".pth", ".bin", ".ckpt", ".torch"),
    vague_suffixes=(".bin",),
    begins=lambda begin: begin.startswith((_ZIP, _PICKLE)),
    names_suffice=False,
    takes_the_rest=True,  # it knows older ones and their likes
    folder_files=re.compile(r".*\.bin(\.index\.json)?", re.DOTALL),
    folder_marks=re.compile(
        r"pytorch_model\.bin|.*\.bin\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.bin", re.DOTALL
    ),
    read_file="dcp.storage.formats.torch.file:index_of_torch_file",
    read_folder="dcp.storage.formats.opening.weights_folder:index_of_bin_folder",
    target=Target(name="torch", layout="dcp.conversion.targets.torch_save:lay_out", as_file="always"),
)
TORCH_DCP: Final = Format(
    name="torch_dcp",
    has_commit=True,
    data_files=re.compile(r"__.*\.distcp|.*\.safetensors", re.DOTALL),
    is_loose=True,
)
