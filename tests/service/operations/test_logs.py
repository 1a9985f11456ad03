"""Tests of logs. Internal: records of any form go through the very processors.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog

from dcp.server.process.logs import configure_logs
from dcp.server.security.redaction import redact
from dcp.server.settings import Settings
from tests.support.app import running_app

KEY = f"dcp_abcdefgh_{'S' * 43}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key {KEY} refused", "key dcp_abcdefgh_*** refused"),
        ("signed with whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "signed with whsec_***"),
        ("Authorization: Bearer abc.def-ghijk", "Authorization: Bearer ***"),
        ("postgresql://dcp:hunter2@host/db", "postgresql://dcp:***@host/db"),
        ("GET https://b.s3/x?X-Amz-Signature=abc123&x=1", "GET https://b.s3/x?X-Amz-Signature=***&x=1"),
        ("nothing to hide: dcp_step-1 at 12:30@night", "nothing to hide: dcp_step-1 at 12:30@night"),
    ],
)
def test_secrets_in_texts(text: str, shown: str) -> None:
    """Keys, passwords in URLs and signatures are replaced; all else stays."""
    assert redact(text) == shown


def test_secrets_by_name() -> None:
    """What is called a secret is none of the log's business, however deep it is."""
    found = redact({"a": [{"api_key": "x", "Password": 1, "path": "/x"}], "session_token": ["t"]})
    assert found == {"a": [{"api_key": "***", "Password": "***", "path": "/x"}], "session_token": "***"}


def test_what_is_below_the_level_is_not_even_made(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that nobody reads costs nothing: its values are not looked at."""

    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("looked at")

    configure_logs(Settings(log_level="warning"))
    structlog.get_logger("ours").info("%s", Unprintable())
    assert capsys.readouterr().err == ""
    with pytest.raises(AssertionError, match="looked at"):
        structlog.get_logger("ours").warning("%s", Unprintable())


def test_json_lines(logs_as_before: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and those of other libraries alike are one JSON object a line, tracebacks included."""
    configure_logs(Settings(log_format="json"))
    structlog.get_logger("ours").info("something", secret="x", url="postgresql://u:p@h/d", count=3)
    logging.getLogger("theirs").warning("asked with %s", KEY)
    try:
        raise RuntimeError(f"with {KEY}")
    except RuntimeError:
        structlog.get_logger("ours").exception("failed")
    logging.getLogger("ours").debug("too quiet")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["something", "asked with dcp_abcdefgh_***", "failed"]
    assert (lines[0]["secret"], lines[0]["url"], lines[0]["count"]) == ("***", "postgresql://u:***@h/d", 3)
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert "RuntimeError: with dcp_abcdefgh_***" in lines[2]["exception"]


def test_what_others_write_does_nothing_to_a_terminal(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of paths and names are shown; tracebacks keep their lines, and words theirs."""
    configure_logs(Settings(log_format="console"))
    log = structlog.get_logger("ours")
    log.info("request", path="/a\x1b[2J\x00\u2028b", root="läufe", other="a\nb \x9b")
    try:
        raise RuntimeError("once")
    except RuntimeError:
        log.exception("failed")
    shown = capsys.readouterr().err
    assert r"path=/a\x1b[2J\x00\u2028b" in shown and "root=läufe" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown.splitlines()[1].count("failed") == 1 and shown.splitlines()[-1] == "RuntimeError: once"


def test_what_libraries_tell_of_their_own_work_is_left_out(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first start of a service is not a page of its migration tool's plugins."""
    configure_logs(Settings(log_format="json"))
    for name in ("alembic.runtime.plugins", "alembic.runtime.migration", "httpx", "botocore.credentials"):
        logging.getLogger(name).info("set up")
        logging.getLogger(name).warning("look at this")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["look at this"] * 4


def test_requests(logs_as_before: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A line tells who asked what, with which result; neither the key nor the query nor the body."""
    with running_app(f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path) as app:
        configure_logs(Settings(log_format="json"))
        secret = app.key("admin", name="boss")
        headers = {"Authorization": f"Bearer {secret}", "X-Request-ID": "r1"}
        app.base.get("/api/v1/checkpoints?tag=hidden-one", headers=headers)
        made = app.base.post("/api/v1/keys", json={"name": "hidden-two"}, headers=headers).json()["key"]
        app.base.get("/healthz")
        # the client of the tests tells of its requests as well
        ours = [line for line in capsys.readouterr().err.splitlines() if '"logger": "httpx' not in line]
    text = "\n".join(ours)
    lines = [json.loads(line) for line in ours if '"request"' in line]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/api/v1/checkpoints", 200),
        ("POST", "/api/v1/keys", 201),
    ]
    assert all(line["actor"] == "key:boss" and line["request_id"] == "r1" for line in lines)
    for hidden in (secret, secret[13:], made, "hidden-one", "hidden-two"):
        assert hidden not in text
