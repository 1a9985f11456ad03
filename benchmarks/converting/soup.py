"""Checkpoints of one model to merge, as fine-tuning produces them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SOURCES", "WEIGHTS", "save_soup"]

SOURCES = 8
WEIGHTS = [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]

_TENSOR_BYTES = 32 << 20
_WIDTH = 4096


def save_soup(folder: Path, size_bytes: float) -> None:
    """Write `SOURCES` files of about ``size_bytes`` each in bfloat16."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    rows = max(1, int(min(size_bytes, _TENSOR_BYTES)) // (2 * _WIDTH))
    count = max(1, round(size_bytes / (2 * rows * _WIDTH)))
    for number in range(SOURCES):
        state = {f"layers.{n}.weight": torch.randn(rows, _WIDTH, dtype=torch.bfloat16) for n in range(count)}
        save_file(state, folder / f"{number}.safetensors")
