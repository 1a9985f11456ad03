"""Write the generated pages, or with ``--check`` compare them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools.reference.command_line import command_line
from tools.reference.errors import errors
from tools.reference.metrics import metrics
from tools.reference.rest import rest, rest_models
from tools.reference.settings import settings

PAGES: Final = Path(__file__).parents[2] / "docs" / "reference" / "generated"
WRITERS: Final[dict[str, Callable[[], str]]] = {
    "command-line": command_line,
    "errors": errors,
    "metrics": metrics,
    "rest": rest,
    "rest-models": rest_models,
    "settings": settings,
}


def main() -> None:
    """Write stale pages; with ``--check`` name them and fail."""
    texts = {PAGES / f"{name}.md": f"{write().rstrip()}\n" for name, write in WRITERS.items()}
    stale = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    unknown = set(PAGES.glob("*.md")) - set(texts)
    if "--check" in sys.argv and (stale or unknown):
        sys.exit(f"stale, run `make reference`: {', '.join(map(str, (*stale, *unknown)))}")
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in unknown:
        path.unlink()
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
