"""The text to learn: the source of this very package, and which windows of it each step reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["VOCABULARY", "batch_of_step", "read_tokens", "window_batch", "write_corpus"]

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


def read_tokens(path: Path) -> torch.Tensor:
    """The text as int64 tokens, shape [characters]."""
    import torch

    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def batch_of_step(tokens: torch.Tensor, step: int, windows: int, context: int) -> torch.Tensor:
    """Where the windows of ``step`` begin, shape [windows]: a function of the step alone.

    Neither the number of ranks nor what ran before the step has any influence, so that a resumed run on
    another number of ranks reads the same text.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * step + 17)
    return torch.randint(0, len(tokens) - context - 1, (windows,), generator=generator)


def window_batch(
    tokens: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The characters of the windows at ``starts`` and those that follow each: two of [windows, context]."""
    import torch

    positions = starts[:, None] + torch.arange(context)
    return tokens[positions], tokens[positions + 1]
