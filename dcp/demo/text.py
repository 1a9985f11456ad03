"""The text to learn: the source of this very package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["VOCABULARY", "write_corpus"]

VOCABULARY = 128
"""ASCII: one token a character."""

_CORPUS_CHARACTERS = 400_000


def write_corpus(path: Path) -> int:
    """Write the text to ``path`` and return its characters.

    A copy, made once, so that every run of one demo reads the same whatever happens to the package meanwhile.
    """
    package = Path(__file__).parents[1]
    sources = [p for p in package.rglob("*.py") if p.is_file()]
    # the layers are links in a checkout, which rglob does not follow before Python 3.13
    for layer in ("planners", "storage"):
        sources += (package / layer).rglob("*.py")
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted({p.resolve() for p in sources}))
    data = text.encode("ascii", errors="ignore")[:_CORPUS_CHARACTERS]
    path.write_bytes(data)
    return len(data)
