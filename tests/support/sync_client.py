"""`dcp.server.client.synchronous`, made of `dcp.server.client.asynchronous`: the same words without `await`.

``make sync-client`` writes it; a test compares.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["ASYNCHRONOUS", "MODULES", "SYNCHRONOUS", "synchronous"]

_CLIENT: Final = Path(__file__).parents[2] / "server" / "client"
ASYNCHRONOUS: Final = _CLIENT / "asynchronous"
SYNCHRONOUS: Final = _CLIENT / "synchronous"
MODULES: Final = ("admin.py", "client.py", "connection.py")

_REWRITTEN: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(?:async|await) ", ""),
        (r"\bAwaitable\[(\w+)\]", r"\1"),
        (r", Awaitable\b|\bAwaitable, ", ""),
        # of ours, of httpx and of typing alike
        (r"\bAsync([A-Z]\w+)", r"\1"),
        (r"\basynccontextmanager\b", "contextmanager"),
        (r"\b__a(iter|enter|exit)__", r"__\1__"),
        # httpx's methods of an answer
        (r"\.a(close|read|iter_raw|iter_bytes)\(", r".\1("),
        (r"\banyio\b", "time"),
        (r"\basynchronous\b", "synchronous"),
    )
)


def synchronous(module: str) -> str:
    """What ``module`` of the folder is, made of its namesake; in the style of the repository."""
    text = (ASYNCHRONOUS / module).read_text()
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = f"# Made of asynchronous/{module} by `make sync-client`: edit that one.\n{text}"
    # sorted imports, `yield from` and `list()`, which have no like among what is awaited
    repair = ["check", "--quiet", "--fix", "--unsafe-fixes", "--select", "I,C416,UP028"]
    return _ruff(["format", "--quiet"], module, _ruff(repair, module, text))


def _ruff(command: list[str], module: str, text: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(SYNCHRONOUS / module), "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"ruff {command[0]} of {module}: {run.stderr or run.stdout}")
    return run.stdout


def main() -> None:
    """Write all of them."""
    for module in MODULES:
        (SYNCHRONOUS / module).write_text(synchronous(module))


if __name__ == "__main__":
    main()
