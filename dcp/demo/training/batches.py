"""Which windows of the text each step reads, as tensors."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["batch_of_step", "read_tokens", "window_batch"]


def read_tokens(path: Path) -> torch.Tensor:
    """The text as int64 tokens, shape [characters]."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def batch_of_step(tokens: torch.Tensor, step: int, windows: int, context: int) -> torch.Tensor:
    """Where the windows of ``step`` begin, shape [windows]: a function of the step alone.

    Neither the number of ranks nor what ran before the step has any influence, so that a resumed run on
    another number of ranks reads the same text.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + 17)
    return torch.randint(0, len(tokens) - context - 1, (windows,), generator=generator)


def window_batch(
    tokens: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The characters of the windows at ``starts`` and those that follow each: two of [windows, context]."""
    positions = starts[:, None] + torch.arange(context)
    return tokens[positions], tokens[positions + 1]
