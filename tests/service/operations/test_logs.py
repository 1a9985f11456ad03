"""Logs: formats and hidden secrets. Internal: records go through the processors; see also test_serving."""

from __future__ import annotations

import json
import logging

import pytest
import structlog

from dcp.server.core.logs import configure_logs
from dcp.server.core.settings import Settings

KEY = f"dcp_abcdefgh_{'S' * 43}"


def test_json_lines(logs_as_before: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of the service and of libraries are one JSON object a line, with tracebacks."""
    configure_logs(Settings(log_format="json"))
    structlog.get_logger("own").info("something", secret="x", url="postgresql://u:p@h/d", count=3)
    logging.getLogger("library").warning("asked with %s", KEY)
    try:
        raise RuntimeError(f"with {KEY}")
    except RuntimeError:
        structlog.get_logger("own").exception("failed")
    logging.getLogger("own").debug("too quiet")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["something", "asked with dcp_abcdefgh_***", "failed"]
    assert (lines[0]["secret"], lines[0]["url"], lines[0]["count"]) == ("***", "postgresql://u:***@h/d", 3)
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert "RuntimeError: with dcp_abcdefgh_***" in lines[2]["exception"]


def test_control_characters_are_escaped(logs_as_before: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters are escaped; tracebacks keep their lines, and letters of any language stay."""
    configure_logs(Settings(log_format="console"))
    log = structlog.get_logger("own")
    log.info("request", path="/a\x1b[2J\x00\u2028b", root="läufe", other="a\nb \x9b")
    try:
        raise RuntimeError("once")
    except RuntimeError:
        log.exception("failed")
    shown = capsys.readouterr().err
    assert r"path=/a\x1b[2J\x00\u2028b" in shown and "root=läufe" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown.splitlines()[1].count("failed") == 1 and shown.splitlines()[-1] == "RuntimeError: once"
