"""Translate asynchronous Python to synchronous Python: the same code without `await`."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["synchronous"]

_REWRITTEN: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(?:async|await) ", ""),
        (r"\bAwaitable\[(\w+)\]", r"\1"),
        (r", Awaitable\b|\bAwaitable, ", ""),
        # classes of the client, of httpx and of typing
        (r"\bAsync([A-Z]\w+)", r"\1"),
        (r"\basynccontextmanager\b", "contextmanager"),
        (r"\b__a(iter|enter|exit)__", r"__\1__"),
        # methods of httpx responses
        (r"\.a(close|read|iter_raw|iter_bytes)\(", r".\1("),
        (r"\banyio\b", "time"),
        (r"\basynchronous\b", "synchronous"),
    )
)


def synchronous(text: str) -> str:
    """Rewrite the module ``text`` without `async` and `await`."""
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text
