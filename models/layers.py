"""The layers that several families share: the embedding of tokens alone, the final norm and the head.

A layer is a module with forward(x, key=None): one tensor in, one out; `key` [B] int64 turns dropout on.
Shape letters: B micro-batch size, T sequence, D model (hidden), V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from conf.schema import ModelConfig
from models.dropout import Dropout


class TokenEmbedding(nn.Module):
    """The layer `embedding` of a family without a position table: ids [B, T] int64 -> [B, T, D]."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.dropout = Dropout(model.dropout, layer=0, site=0)

    def forward(self, ids: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.dropout(self.token(ids), key)


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
