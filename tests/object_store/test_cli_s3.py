"""``dcp ls``, ``show`` and ``verify`` of URLs: what they print, what they ask for, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcp
from tests.support.fault_doors import MANIFEST_NAME, METADATA_NAME, Outcome, run
from tests.support.fault_plan import SLOW_DOWN
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import S3Server, raw_s3
from tests.support.versions import version_state

ROOT = Path(__file__).parents[2]


def save(url: str, server: S3Server | FaultProxy) -> str:
    """A small checkpoint; its URL."""
    dcp.save(version_state(7), checkpoint_id=url, storage_options=server.storage_options, no_dist=True)
    return url


def given(server: S3Server | FaultProxy, **changes: Any) -> tuple[str, str]:
    """The option with everything about the server."""
    return "--storage-options", json.dumps({**server.storage_options, **changes})


def failed(outcome: Outcome) -> str:
    """The one line of an error; nothing was printed besides."""
    assert (outcome.status, outcome.out) == (3, ""), outcome
    assert outcome.err.startswith("dcp: ")
    assert outcome.err.count("\n") == 1, outcome.err
    return outcome.err


# -- what they print -----------------------------------------------------------------------------------------


def test_ls_show_and_verify(s3_server: S3Server, s3_root: str) -> None:
    """As on disk: a checkpoint, one that was not committed, one that is damaged."""
    root = f"{s3_root}/run"
    good, half, bad = (save(f"{root}/step-{step}", s3_server) for step in (10, 2, 11))
    options = given(s3_server)
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
    """A variable of ours has the JSON, and is for URLs only; what botocore reads itself serves as well."""
    url = save(f"{s3_root}/step-1", s3_server)
    with monkeypatch.context() as patch:
        patch.setenv("DCP_STORAGE_OPTIONS", json.dumps(s3_server.storage_options))
        assert run("ls", s3_root, "--json").json[0]["url"] == url
        assert run("verify", url).status == 0
        assert run("ls", tmp_path).status == 0
        assert "SignatureDoesNotMatch" in failed(run("ls", s3_root, *given(s3_server, secret="other")))
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    assert run("show", url, "--json").json["checkpoint"]["url"] == url


@pytest.mark.exhaustive  # test_manager_s3.py and test_request_counts.py count the requests for steps
def test_a_thousand_steps(s3_proxy: FaultProxy, s3_root: str) -> None:
    """The quick listing opens nothing. The full one reads the small files of each checkpoint, several at a
    time; neither asks for data."""
    many, few = f"{s3_root}/many", f"{s3_root}/few"
    save(f"{many}/step-0", s3_proxy)
    with raw_s3(s3_proxy.server) as raw:
        manifest = raw.read(f"{many}/step-0/{MANIFEST_NAME}")
        for root, steps in ((many, range(1, 1000)), (few, range(50))):
            raw.write_many([(f"{root}/step-{step}/{MANIFEST_NAME}", manifest) for step in steps])
    s3_proxy.log.clear()
    rows = run("ls", "--quick", many, "--json", *given(s3_proxy)).json
    assert s3_proxy.counts() == {"ListObjectsV2": 3}  # of the root itself, and 1,002 objects
    assert [(row["step"], row["state"], row["format"]) for row in rows] == [
        (step, "committed", None) for step in range(1000)
    ]
    assert rows[0]["bytes"] > rows[1]["bytes"] == 0
    assert all(row["committed_seconds"] for row in rows)
    s3_proxy.log.clear()
    rows = run("ls", few, "--json", *given(s3_proxy)).json
    assert [(row["step"], row["format"], row["tensors"]) for row in rows] == [
        (step, "dcp", 6) for step in range(50)
    ]
    assert s3_proxy.counts()["ListObjectsV2"] == 2
    assert sum(s3_proxy.counts().values()) <= 2 + 2 * 50  # the manifest, and whether there is a `.metadata`
    assert not any(request.key.endswith(".distcp") for request in s3_proxy.log)


# -- how they fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["ls", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("show", "verify"))]
)
def test_failures_are_one_line(command: str, s3_server: S3Server, s3_root: str) -> None:
    """No such bucket, wrong keys, no permission, an endpoint that does not answer: what, where, and nothing
    of the secrets."""
    secret, nobody = s3_server.storage_options["secret"], "http://127.0.0.1:9"
    wanted: list[tuple[str, tuple[str, str], str]] = [
        ("s3://no-such-bucket/run", given(s3_server), "there is no bucket 'no-such-bucket'"),
        (s3_root, given(s3_server, secret="hush-hush"), "SignatureDoesNotMatch"),
        (s3_root, given(s3_server, key="nobody"), "InvalidAccessKeyId"),
        (s3_root, given(s3_server, key=None, secret=None, anon=True), "AccessDenied"),
        (s3_root, given(s3_server, endpoint_url=nobody, retry_seconds=0.3), f"connect to .*{nobody}/"),
        (s3_root, given(s3_server, no_such_option="hush-hush"), "no_such_option"),
        (s3_root, given(s3_server, concurrency="hush-hush"), "concurrency must be a whole number"),
        (s3_root, ("--storage-options", '{"secret": "hush-hush"'), "--storage-options is not a JSON object"),
        (s3_root, ("--storage-options", '["hush-hush"]'), "--storage-options is not a JSON object"),
        ("/tmp", given(s3_server), "takes no storage options, and was given client_kwargs, endpoint_url"),
        ("s3:/bucket/run", ("--json", "--json"), "give 's3://bucket/run'"),
    ]
    for uri, options, message in wanted:
        outcome = run(command, uri, *options)
        line = failed(outcome if command != "verify" else Outcome(outcome.status, "", outcome.err))
        parts = message.split(".*")
        assert all(part in line for part in parts), (message, line)
        assert "hush-hush" not in line
        assert secret not in line
        assert "internal error" not in line


def test_nothing_there(s3_server: S3Server, s3_root: str) -> None:
    """A prefix without objects is an empty folder, and no checkpoint."""
    listed = run("ls", s3_root, *given(s3_server))
    assert (listed.status, listed.out, listed.err) == (0, "", f"dcp: {s3_root}: no checkpoints\n")
    for command in ("show", "verify"):
        outcome = run(command, s3_root, *given(s3_server))
        assert outcome.status == 3
        assert f"{s3_root} holds no checkpoint" in outcome.err


def test_throttling_is_waited_out(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Without a word about it, unless it does not end."""
    url = save(f"{s3_root}/step-1", s3_proxy)
    s3_proxy.spoil(SLOW_DOWN, times=3)
    quiet = run("show", url, *given(s3_proxy))
    assert (quiet.status, quiet.err) == (0, "")
    s3_proxy.spoil(SLOW_DOWN, times=None)
    assert "SlowDown" in failed(run("show", url, *given(s3_proxy, retry_seconds=0.5)))


def test_a_missing_package_is_named() -> None:
    """By the command that installs it, in one line, whichever command needs it."""
    program = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from dcp.cli.app import app\n"
        "for command in ('ls', 'show', 'verify'):\n"
        "    try: app(args=[command, 's3://bucket/run'], prog_name='dcp')\n"
        "    except SystemExit as ended: print(ended.code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["3"] * 3
    assert ran.stderr.splitlines() == ["dcp: s3://bucket needs s3fs: pip install 'dcphub[s3]'"] * 3
