"""A small transformer that reads characters: real in every part, only narrow and shallow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

__all__ = ["ModelSize", "Transformer", "build_model"]

VOCABULARY = 128
"""ASCII: one token a character."""


@dataclass(frozen=True)
class ModelSize:
    """The size of the demo's model: 2.8 million parameters, 34 MB with AdamW's two moments.

    Most of them are the table of character pairs. It costs little time, and lets a rank's file outgrow the
    8 MiB that are written at once: a save can then be killed between two writes of one file.
    """

    width: int = 128
    heads: int = 4
    blocks: int = 3
    context: int = 96


class TransformerBlock(nn.Module):
    """Causal attention and a two-layer perceptron, each on normed input and added to it."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map shape [windows, context, width] to the same."""
        windows, context, width = x.shape
        projected = self.attention_in(self.attention_norm(x))
        heads = projected.view(windows, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(windows, context, width))
        added: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + added


class Transformer(nn.Module):
    """Characters to the logits of the next ones; the output layer shares the character embedding's weight."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, size.width)
        self.pair = nn.Embedding(VOCABULARY * VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(TransformerBlock(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for table in (self.character, self.pair, self.position):
            nn.init.normal_(table.weight, std=0.05)
        self.head.weight = self.character.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 of [windows, context] to float32 of [windows, context, VOCABULARY]."""
        before = F.pad(tokens[:, :-1], (1, 0))
        x = self.character(tokens) + self.pair(before * VOCABULARY + tokens)
        x = x + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build_model(size: ModelSize) -> Transformer:
    """Build the model with its parameters sharded over all ranks (FSDP2): equal values whatever their
    number."""
    torch.manual_seed(20)
    model = Transformer(size)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model
