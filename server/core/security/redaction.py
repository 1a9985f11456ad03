"""Redaction of secrets in answers and logs."""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["redact"]

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
    """``value`` with secrets in its strings replaced; lists and mappings are gone through."""
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
