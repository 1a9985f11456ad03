"""Plain English in docstrings: openers and words that a first reader has to decode. ``make lint`` runs it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

_OPENER = re.compile(r"(?:What|Whether|Which|How|Where|Who|Whose|Why|That|Those|Ours|Theirs)\b")
_WORDS = re.compile(r"\b(?:somebody|of ours|of others|what there is|goes on|is about|are about|tell of)\b")


def problems(path: Path) -> list[str]:
    """A line for each docstring that has one."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        for match in filter(None, (_OPENER.match(text), _WORDS.search(text))):
            line = getattr(node, "lineno", 1)
            found.append(f"{path}:{line}: {match[0]!r} in a docstring: begin with a verb or a noun, plainly")
    return found


if __name__ == "__main__":
    told = [
        line for top in sys.argv[1:] for path in sorted(Path(top).rglob("*.py")) for line in problems(path)
    ]
    sys.exit("\n".join(told) if told else 0)
