"""The sharded formats: ours, and stock torch's. What is read is decided by `dcp.storage.formats.open`."""

from __future__ import annotations

import re
from typing import Final

from dcp.storage.formats.format import Format, Target

__all__ = ["DCP", "TORCH_DCP"]

_DATA_FILES: Final = re.compile(r"__.*\.distcp", re.DOTALL)

DCP: Final = Format(
    name="dcp",
    has_commit=True,
    data_files=_DATA_FILES,
    target=Target(name="dcp", layout="dcp.conversion.targets.dcp:lay_out", has_commit=True),
)
TORCH_DCP: Final = Format(
    name="torch_dcp",
    has_commit=True,
    data_files=re.compile(rf"{_DATA_FILES.pattern}|.*\.safetensors", re.DOTALL),
    is_loose=True,
)
