"""GPT-2's Transformer: learned positions, pre-LayerNorm blocks, causal attention, GELU, biases everywhere but the head.

Shape letters: B micro-batch size, T sequence, D model (hidden), H heads, F inner width of the feed-forward.
"""

from __future__ import annotations

import torch.nn.functional as fn
from torch import Tensor, nn

from conf.schema import ModelConfig
from models.describe import feedforward_width
from models.documents import attention_mask
from models.dropout import Dropout
from models.layers import Head, Norm


class Positions(nn.Embedding):
    """The position table: rows first .. first + T - 1, [T, D]."""

    def forward(self, first: int, T: int) -> Tensor:
        return self.weight[first : first + T]


class Embedding(nn.Module):
    """Token plus position: ids [B, T] int64 -> [B, T, D]; T at most model.positions.

    Under sequence parallelism `token` gives this rank's part of the sequence, [B, T / t, D], and so does the layer.
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.position = Positions(model.positions, model.hidden)
        self.dropout = Dropout(model.dropout, layer=0, site=0)

    def forward(self, ids: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.token(ids)
        return self.dropout(x + self.position(self.dropout.part * x.shape[1], x.shape[1]), key)


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D].

    The rows of `qkv` are ordered head by head, each head's query, key and value together, so that a tensor-parallel
    rank's contiguous part of them is whole heads (as Megatron-LM does, arXiv 1909.08053).
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.head_width = model.hidden // model.heads
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.projection = nn.Linear(model.hidden, model.hidden)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """documents: [B, T] int64, tokens see those of their own document only; None = every token before them."""
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2)  # [B, H, T, 3, D / H]
        q, k, v = heads.unbind(3)
        mask = None if documents is None else attention_mask(documents)
        mixed = fn.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """[B, T, D] -> [B, T, F] -> [B, T, D]."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.up = nn.Linear(model.hidden, feedforward_width(model))
        self.down = nn.Linear(feedforward_width(model), model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(fn.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One Transformer block, [B, T, D] -> [B, T, D]; `layer` is its index in the model's list."""

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden)
        self.attention = Attention(model)
        self.attention_dropout = Dropout(model.dropout, layer, site=0)
        self.feedforward_norm = nn.LayerNorm(model.hidden)
        self.feedforward = FeedForward(model)
        self.feedforward_dropout = Dropout(model.dropout, layer, site=1)

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), documents), key)
        return x + self.feedforward_dropout(self.feedforward(self.feedforward_norm(x)), key)


def make_layer(model: ModelConfig, kind: str, layer: int) -> nn.Module:
    """The module of list entry number `layer`, of `kind` embedding, block, norm or head."""
    if kind == "block":
        return Block(model, layer)
    if kind == "norm":
        return Norm(model.hidden)
    return Embedding(model) if kind == "embedding" else Head(model)
