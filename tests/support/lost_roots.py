"""Lost folders of roots: a disk that is not mounted, or another disk in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.catalog_roots import write_manifest

__all__ = ["PLACES", "is_a_link_elsewhere", "is_emptied", "is_removed", "put_back"]


def is_removed(root: Path) -> None:
    """Remove the folder."""
    root.rename(root.with_name("elsewhere"))


def is_emptied(root: Path) -> None:
    """Leave an empty mount point without its disk."""
    is_removed(root)
    root.mkdir()


def is_a_link_elsewhere(root: Path) -> None:
    """Replace the folder by a link to another one."""
    is_removed(root)
    write_manifest(root.with_name("another") / "foreign" / "step-9")
    root.symlink_to(root.with_name("another"))


PLACES = [is_emptied, is_a_link_elsewhere, pytest.param(is_removed, marks=pytest.mark.exhaustive)]


def put_back(root: Path) -> None:
    """Restore the original folder."""
    if root.is_symlink():
        root.unlink()
    elif root.exists():
        shutil.rmtree(root)
    root.with_name("elsewhere").rename(root)
