"""Command line on URLs of a real S3 server: output, requests and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import StorageError
from tests.support.fault_doors import MANIFEST_NAME, METADATA_NAME, Outcome, run, verified
from tests.support.fault_plan import SLOW_DOWN, Fault, Kind
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import S3Server, raw_s3
from tests.support.versions import version_of, version_state


def _save(url: str, server: S3Server | FaultProxy, **more: Any) -> str:
    options = server.storage_options
    dcp.save(version_state(7) | more, checkpoint_id=url, storage_options=options, no_dist=True)
    return url


def _given(server: S3Server | FaultProxy, **changes: Any) -> tuple[str, str]:
    return "--storage-options", json.dumps({**server.storage_options, **changes})


def _failed(outcome: Outcome) -> str:
    assert (outcome.status, outcome.out) == (3, ""), outcome
    assert outcome.err.startswith("dcp: ")
    assert outcome.err.count("\n") == 1, outcome.err
    return outcome.err


# -- output --------------------------------------------------------------------------------------------------


def test_ls_show_and_verify(s3_server: S3Server, s3_root: str) -> None:
    """A committed, an incomplete and a damaged checkpoint are listed as on disk."""
    root = f"{s3_root}/run"
    good, half, bad = (_save(f"{root}/step-{step}", s3_server) for step in (10, 2, 11))
    options = _given(s3_server)
    with raw_s3(s3_server) as raw:
        for name in (MANIFEST_NAME, METADATA_NAME):
            raw.delete(f"{half}/{name}")
        raw.write(f"{bad}/{MANIFEST_NAME}", b"no manifest")
        raw.write(f"{root}/other/readme", b"")
    listed = run("ls", root, *options)
    lines = [line.split() for line in listed.out.splitlines()[3:]]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("step-2", "2", "incomplete"),
        ("step-10", "10", "committed"),
        ("step-11", "11", "unreadable"),
    ]
    assert "step-11: " in listed.err
    (run_row,) = run("ls", s3_root, "--json", *options).json
    assert (run_row["state"], run_row["url"], run_row["checkpoints"]) == ("run", root, 2)
    (row,) = run("ls", f"{good}/", "--json", *options).json
    assert (row["url"], row["name"], row["format"], row["tensors"]) == (good, "step-10", "dcp", 6)
    shown = run("show", good, "--objects", "--json", *options).json
    assert shown["checkpoint"]["url"] == good
    assert {value["fqn"]: value["value"] for value in shown["objects"]}["step"] == 7
    verified = run("verify", good, bad, *options)
    assert verified.status == 1
    assert f"{good}: ok" in verified.out
    assert f"{bad}: 1 finding" in verified.out


def test_options_from_the_environment(
    s3_server: S3Server, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP_STORAGE_OPTIONS has options as JSON, for URLs only; botocore's own variables work as well."""
    url = _save(f"{s3_root}/step-1", s3_server)
    with monkeypatch.context() as patch:
        patch.setenv("DCP_STORAGE_OPTIONS", json.dumps(s3_server.storage_options))
        assert run("ls", s3_root, "--json").json[0]["url"] == url
        assert run("verify", url).status == 0
        assert run("ls", tmp_path).status == 0
        assert "SignatureDoesNotMatch" in _failed(run("ls", s3_root, *_given(s3_server, secret="other")))
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    assert run("show", url, "--json").json["checkpoint"]["url"] == url


# -- values and removal ---------------------------------------------------------------------------------


def test_removal_in_a_bucket(s3_server: S3Server, s3_root: str) -> None:
    """Leftovers and uploads of killed saves are listed and removed on request; the checkpoint verifies."""
    kept, gone = _save(f"{s3_root}/step-1", s3_server), _save(f"{s3_root}/step-2", s3_server)
    options = _given(s3_server)
    with raw_s3(s3_server) as raw:
        for name in ("__5_0.0123abcd.distcp", "__6_0.4567abcd.distcp"):
            raw.begin_upload(f"{kept}/{name}")
        raw.write(f"{kept}/__7_0.0123abcd.distcp", b"remains")
        before = raw.list(s3_root)

        def uploads() -> list[str]:
            return sorted(key.rpartition("/")[2] for key in raw.uploads(kept).values())

        planned = run("gc", s3_root, "--hours", "0", *options)
        assert (planned.status, planned.err) == (0, "dcp: dry run, nothing removed: pass --yes to remove\n")
        assert "  __7_0.0123abcd.distcp\n" in planned.out
        assert "  __6_0.4567abcd.distcp (unfinished upload; kept without --uploads)\n" in planned.out
        assert run("rm", gone, *options).out.count(f"{gone}/") == 3
        assert raw.list(s3_root) == before
        assert len(uploads()) == 2
        assert "removed 1 file, 7 B" in run("gc", s3_root, "--hours", "0", "--yes", *options).out
        # the other upload was of the killed save
        assert uploads() == ["__6_0.4567abcd.distcp"]
        assert run("gc", s3_root, "--yes", "--uploads", *options).status == 0
        assert uploads() == []
        assert run("rm", gone, "--yes", *options).status == 0
        assert {name.split("/")[0] for name in raw.list(s3_root)} == {"step-1"}
    assert verified(kept, **s3_server.storage_options)["ok"]


# -- errors --------------------------------------------------------------------------------------------------


def test_failures_are_one_line(s3_server: S3Server, s3_root: str) -> None:
    """A missing bucket, wrong keys, a missing permission and a dead endpoint are errors of one line, with the
    place and without secrets."""
    secret, no_server = s3_server.storage_options["secret"], "http://127.0.0.1:9"
    wanted: list[tuple[str, tuple[str, str], str]] = [
        ("s3://no-such-bucket/run", _given(s3_server), "the bucket 'no-such-bucket' does not exist"),
        (s3_root, _given(s3_server, secret="hush-hush"), "SignatureDoesNotMatch"),
        (s3_root, _given(s3_server, key="unknown"), "InvalidAccessKeyId"),
        (s3_root, _given(s3_server, key=None, secret=None, anon=True), "AccessDenied"),
        (s3_root, _given(s3_server, endpoint_url=no_server, retry_seconds=0.3), f"connect to .*{no_server}/"),
        (s3_root, _given(s3_server, no_such_option="hush-hush"), "no_such_option"),
        (s3_root, _given(s3_server, concurrency="hush-hush"), "concurrency must be a whole number"),
        (
            s3_root,
            ("--storage-options", '{"secret": "hush-hush"'),
            "--storage-options: expected a JSON object",
        ),
        (s3_root, ("--storage-options", '["hush-hush"]'), "--storage-options: expected a JSON object"),
        ("/tmp", _given(s3_server), "takes no storage options: remove client_kwargs, endpoint_url"),
        ("s3:/bucket/run", ("--json", "--json"), "pass 's3://bucket/run'"),
    ]
    for uri, options, message in wanted:
        line = _failed(run("ls", uri, *options))
        assert all(part in line for part in message.split(".*")), (message, line)
        assert not any(word in line for word in ("hush-hush", secret, "internal error"))


def test_a_root_without_list_permission(s3_proxy: FaultProxy, s3_root: str) -> None:
    """The command and the manager raise AccessDenied for a root without permission to list, and do not take
    the root for empty. A checkpoint loads by its URL."""
    url, options = _save(f"{s3_root}/step-1", s3_proxy), s3_proxy.storage_options
    s3_proxy.spoil(Fault(Kind.ANSWER, 403, "AccessDenied"), operation="ListObjectsV2", times=None)
    assert "AccessDenied" in _failed(run("ls", s3_root, *_given(s3_proxy)))
    with pytest.raises(StorageError, match="AccessDenied"):
        dcp.CheckpointManager(s3_root, storage_options=options, no_dist=True).all_steps()
    state = version_state(0)
    dcp.load(state, checkpoint_id=url, storage_options=options, no_dist=True)
    assert version_of(state) == 7


def test_throttled_requests_are_repeated(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Throttled requests are repeated without output, up to a time limit."""
    url = _save(f"{s3_root}/step-1", s3_proxy)
    s3_proxy.spoil(SLOW_DOWN, times=3)
    quiet = run("show", url, *_given(s3_proxy))
    assert (quiet.status, quiet.err) == (0, "")
    s3_proxy.spoil(SLOW_DOWN, times=None)
    assert "SlowDown" in _failed(run("show", url, *_given(s3_proxy, retry_seconds=0.5)))
