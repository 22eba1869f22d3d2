"""The layers that every family shares: the final norm and the head.

A layer is a module with forward(x, key=None): one tensor in, one out; `key` [B] int64 turns dropout on.
Shape letters: B micro-batch size, T sequence, D model (hidden), V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from conf.schema import ModelConfig


class Norm(nn.LayerNorm):
    """The layer `norm`: [B, T, D] -> [B, T, D]."""

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Head(nn.Linear):
    """The layer `head`: [B, T, D] -> logits [B, T, V]. In a tied model it owns a copy of the embedding's weight."""

    def __init__(self, model: ModelConfig):
        super().__init__(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(x)
