"""The file of a download: what a power cut leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp.server.client.downloads import Download
from tests.support.power_cuts import Recording

_NEW, _OLD = b"new" * 1000, b"old" * 1000


def _download(target: Path) -> None:
    with Download(target, "what", overwrite=True) as download:
        headers = {"content-length": str(len(_NEW)), "etag": '"1"'}
        assert download.begin(200, headers)
        download.write(_NEW)
        download.finish()


@pytest.mark.parametrize("before", [None, _OLD])
def test_a_power_cut_leaves_the_old_file_or_the_new_one(before: bytes | None, tmp_path: Path) -> None:
    """Never a part of one; and the new one, once the download has told that it is there."""
    folder = tmp_path / "work"
    folder.mkdir()
    target = folder / "model.pt"
    if before is not None:
        target.write_bytes(before)
    with Recording(folder) as recording:
        _download(target)
    for what, make in recording.images():
        make(folder)
        assert (target.read_bytes() if target.exists() else None) in (before, _NEW), what
    images = list(recording.images(at_end=True))
    assert images
    for what, make in images:
        make(folder)
        assert target.read_bytes() == _NEW, what
