"""The pipeline tutorials' example as a language model: an embedding, blocks of Linear and ReLU, a head.

A neural bigram: it looks at one token only, without positions, attention or residual branches; dropout acts on the
embedding.
Shape letters: B micro-batch size, T sequence, D model (hidden), V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as fn
from torch import Tensor, nn

from conf.schema import ModelConfig
from models.layers import Head, TokenEmbedding


class Block(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.linear = nn.Linear(model.hidden, model.hidden)

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return fn.relu(self.linear(x))


def make_layer(model: ModelConfig, kind: str, layer: int) -> nn.Module:
    """The module of list entry number `layer`, of `kind` embedding, block or head."""
    if kind == "block":
        return Block(model)
    return TokenEmbedding(model) if kind == "embedding" else Head(model)
