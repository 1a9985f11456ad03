"""``dcp cat``, ``stats``, ``diff``, ``rm`` and ``gc`` of URLs, on a real S3 server."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import dcp
from tests.support.fault_doors import given, run, verified
from tests.support.s3 import S3Server, raw_s3
from tests.support.versions import version_state


def save(url: str, server: S3Server) -> str:
    """A checkpoint with a tensor of several blocks; its URL."""
    options = server.storage_options
    dcp.save(version_state(7) | {"big": big()}, checkpoint_id=url, storage_options=options, no_dist=True)
    return url


def big() -> torch.Tensor:
    """Ten MiB."""
    return torch.arange(2_621_440, dtype=torch.int32).reshape(1024, 2560)


def test_values_of_urls(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """Slices, statistics and differences as on disk, and between the disk and a bucket."""
    url, local = save(f"{s3_root}/step-1", s3_server), tmp_path / "x"
    dcp.save(version_state(7) | {"big": big()}, checkpoint_id=local, no_dist=True)
    options = ("--storage-options", json.dumps(s3_server.storage_options))
    assert run("cat", url, "big", "--slice", "1000:,-1", "--json", *options).json["values"] == (
        big()[1000:, -1].tolist()
    )
    assert run("cat", url, "step", *options).out == "7\n"
    shown = run("stats", url, "--json", *options).json
    assert shown["total"] == run("stats", local, "--json").json["total"]
    for pair in ((url, local), (local, url), (url, url)):
        same = run("diff", *pair, *options)
        assert (same.status, same.err) == (0, "")
    absent = run("cat", f"{s3_root}/none", "w", *options)
    assert (absent.status, absent.err.count("\n")) == (3, 1)


def test_weights_in_a_bucket(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """A torch.save file as an object: read in blocks, compared by its checksums."""
    torch.save({"w": big(), "turned": big().t()}, tmp_path / "m.pt")
    with raw_s3(s3_server) as raw:
        raw.write(f"{s3_root}/m.pt", (tmp_path / "m.pt").read_bytes())
    options = given(s3_server.storage_options)
    shown = run("cat", f"{s3_root}/m.pt", "turned", "--slice", "3:5,:4", "--json", *options).json
    assert shown["values"] == big().t()[3:5, :4].tolist()
    assert run("stats", f"{s3_root}/m.pt", "--json", *options).json["total"]["max"] == 2_621_439
    same = run("diff", f"{s3_root}/m.pt", tmp_path / "m.pt", *options)
    assert (same.status, same.err) == (0, "")


def test_removal_in_a_bucket(s3_server: S3Server, s3_root: str) -> None:
    """Remains and uploads of killed saves are listed; what is told to go goes; the checkpoint verifies."""
    kept, gone = save(f"{s3_root}/step-1", s3_server), save(f"{s3_root}/step-2", s3_server)
    options = ("--storage-options", json.dumps(s3_server.storage_options))
    with raw_s3(s3_server) as raw:
        for name in ("__5_0.0123abcd.distcp", "__6_0.4567abcd.distcp"):
            raw.begin_upload(f"{kept}/{name}")
        raw.write(f"{kept}/__7_0.0123abcd.distcp", b"remains")
        before = raw.list(s3_root)

        def uploads() -> set[str]:
            return {key.rpartition("/")[2] for key in raw.uploads(kept).values()}

        planned = run("gc", s3_root, "--hours", "0", *options)
        assert (planned.status, planned.err) == (0, "dcp: nothing was removed: --yes does it\n")
        assert "  __7_0.0123abcd.distcp\n" in planned.out
        assert "  __6_0.4567abcd.distcp (unfinished upload; stays, unless --uploads)\n" in planned.out
        assert run("rm", gone, *options).out.count(f"{gone}/") == 3
        assert raw.list(s3_root) == before
        assert len(uploads()) == 2
        assert "removed 1 file, 7 B" in run("gc", s3_root, "--hours", "0", "--yes", *options).out
        assert uploads() == {
            "__6_0.4567abcd.distcp"
        }  # the other one was of the save that is known to be dead
        assert run("gc", s3_root, "--yes", "--uploads", *options).status == 0
        assert uploads() == set()
        assert run("rm", gone, "--yes", *options).status == 0
        assert {name.split("/")[0] for name in raw.list(s3_root)} == {"step-1"}
    assert verified(kept, **s3_server.storage_options)["ok"]
