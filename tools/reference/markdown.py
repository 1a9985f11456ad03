"""Markdown parts: cells, tables and values as code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["cell", "code", "paragraphs", "table"]


def cell(text: str) -> str:
    """Return text as one table cell: on one line, with escaped bars."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: Any) -> str:
    """Return a value as inline code: text as it is, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{text}`" if text else '`""`'


def paragraphs(text: str) -> str:
    """Return a docstring as Markdown: paragraphs on one line each, double backticks as single ones."""
    blocks = re.split(r"\n\s*\n", text.strip())
    lines = [block if re.match(r"\s*[-*] ", block) else " ".join(block.split()) for block in blocks]
    return re.sub(r"``([^`]+)``", r"`\1`", "\n\n".join(lines))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns without any text are left out, and a table without rows is empty."""
    cells = [[cell(one) for one in row] for row in rows]
    if not cells:
        return ""
    kept = [number for number in range(len(header)) if any(row[number] for row in cells)]
    lines = [[header[number] for number in kept], ["---"] * len(kept)]
    lines += [[row[number] for number in kept] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
