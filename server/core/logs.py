"""Structured logs on stderr, as text or JSON, without secrets; `redact` also cleans answers.

Messages of `logging` appear in the same form. Every logged string is searched for keys and for passwords in
URLs; values named like secrets are omitted.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

from dcp.server.core.problems import BrokenBodyError
from dcp.server.core.settings import Settings

_NAMES: Final = re.compile(r"(?i)secret|token|password|authorization|cookie|credential|api_?key|access_?key")
_KEYS: Final = re.compile(r"\bdcp_([a-z0-9]{8})_[A-Za-z0-9_-]{20,}")
_WEBHOOK_SECRETS: Final = re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]{8,}")
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_URL_PASSWORDS: Final = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
_SIGNATURES: Final = re.compile(
    r"(?i)\b(x-amz-(?:signature|credential|security-token)|signature|sig)=[^&\s\"']+"
)
_HIDDEN: Final = "***"


def redact(value: Any) -> Any:
    """Return ``value`` with secrets replaced in all strings of lists and mappings."""
    if isinstance(value, str):
        text = _KEYS.sub(rf"dcp_\1_{_HIDDEN}", value)
        text = _WEBHOOK_SECRETS.sub(f"whsec_{_HIDDEN}", text)
        text = _BEARER.sub(rf"\1 {_HIDDEN}", text)
        text = _URL_PASSWORDS.sub(rf"\1:{_HIDDEN}@", text)
        return _SIGNATURES.sub(rf"\1={_HIDDEN}", text)
    if isinstance(value, dict):
        return {
            name: _HIDDEN if isinstance(name, str) and _NAMES.search(name) else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


_OF_LINES: Final = frozenset({"event", "exception", "stack"})
"""Names of values with several lines."""


def configure_logs(settings: Settings) -> None:
    """Set up structlog and `logging` for this process, replacing earlier configuration."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redacted,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,  # first, so that hidden messages cost little
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    plain: list[Any] = [] if settings.log_format == "json" else [_printable]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_worth_telling)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *plain, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # redundant or too verbose
    for name in (
        "uvicorn.access",
        "httpx",
        "httpcore",
        "botocore",
        "aiobotocore",
        "alembic",
    ):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _is_worth_telling(record: logging.LogRecord) -> bool:
    # uvicorn logs a traceback for each request that it aborts (after a second signal or the time limit), and
    # for each aborted response, whose reason is already in the log.
    error = record.exc_info[1] if record.exc_info else None
    is_known = isinstance(error, asyncio.CancelledError | BrokenBodyError)
    return not (record.name == "uvicorn.error" and is_known)


def _printable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Remove terminal control characters: paths and file names are foreign input."""
    for name, value in event.items():
        if name not in _OF_LINES and isinstance(value, str) and not value.isprintable():
            event[name] = "".join(
                char if char.isprintable() else char.encode("unicode_escape").decode() for char in value
            )
    return event


def _redacted(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # names with an underscore belong to structlog
    own = {name: value for name, value in event.items() if not name.startswith("_")}
    event.update(redact(own))
    return event
