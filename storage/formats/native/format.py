"""Our own format. Whether it or stock's counts in a folder is decided by `formats.opening.folder`."""

from __future__ import annotations

import re
from typing import Final

from dcp.storage.formats.format import Format, Target

__all__ = ["DCP"]

DCP: Final = Format(
    name="dcp",
    has_commit=True,
    data_files=re.compile(r"__.*\.distcp", re.DOTALL),
    target=Target(name="dcp", layout="dcp.conversion.targets.dcp:lay_out"),
)
