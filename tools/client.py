"""Generate `dcp.server.client`: models and methods from the OpenAPI document of the service, and the
synchronous client from the asynchronous client.

``python -m tools.client`` writes the files; with ``--check`` it fails if a file is stale.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from dcp.server.app import create_app
from dcp.server.core.settings import Settings
from tools.openapi_client import modules
from tools.synchronous import synchronous

__all__ = ["CLIENT", "generated"]

CLIENT: Final = Path(__file__).parents[1] / "server" / "client"


def generated() -> dict[Path, str]:
    """Return the text of each generated module, in the style of the repository."""
    asynchronous = (CLIENT / "asynchronous.py").read_text()
    written = re.findall(r"\bdef (\w+)\(", asynchronous + (CLIENT / "operations.py").read_text())
    texts = {
        f"generated/{name}.py": f"# Generated from the OpenAPI document by `make client`.\n{text}"
        for name, text in modules(create_app(Settings()).openapi(), written).items()
    }
    head = "# Generated from asynchronous.py by `make client`.\n"
    texts["synchronous.py"] = head + synchronous(asynchronous)
    return {CLIENT / name: _formatted(CLIENT / name, text) for name, text in texts.items()}


def _formatted(path: Path, text: str) -> str:
    # sorted imports, `yield from` and `list()`, which have no asynchronous form
    for command in (["check", "--fix", "--unsafe-fixes", "--select", "I,C416,F401,UP028"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(path), "-"]
        run = subprocess.run(ruff, input=text, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"ruff {command[0]} of {path}: {run.stderr or run.stdout}")
        text = run.stdout
    return text


def main() -> None:
    """Write the files; with ``--check`` compare them."""
    stale = {
        path: text for path, text in generated().items() if not path.exists() or path.read_text() != text
    }
    if "--check" in sys.argv and stale:
        sys.exit(f"stale, run `make client`: {', '.join(str(path) for path in stale)}")
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
