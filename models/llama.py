"""Llama's Transformer: rotary positions, RMSNorm before each branch, grouped-query attention, SwiGLU, no biases.

Touvron et al. 2023, arXiv 2302.13971; grouped queries and rope_theta as in Llama 3, arXiv 2407.21783. Weights are laid
out as transformers' LlamaForCausalLM has them: a head's first half is rotated against its second half.

Shape letters: B micro-batch size, T sequence, D model (hidden), H query heads, K heads of keys and values, W width of a
head (D / H), F inner width of the feed-forward.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from conf.schema import ModelConfig
from models.describe import feedforward_width
from models.documents import attention_mask
from models.dropout import Dropout
from models.layers import Head, TokenEmbedding

# Llama 3.1's scaling of rotary frequencies ("llama3"): the sequence it was first trained with, and between how many
# turns in that sequence the scaling sets in (arXiv 2407.21783, section 3.4.2; its released configuration)
ORIGINAL_POSITIONS, LOW_TURNS, HIGH_TURNS = 8192, 1.0, 4.0


def rotary_frequencies(width: int, theta: float, scaling: float = 1.0) -> Tensor:
    """Radians a position of each pair of a head's columns: [W / 2] float64.

    theta^(-2i / W) (Su et al., arXiv 2104.09864). `scaling` over 1 stretches the slow ones for long contexts, as Llama
    3.1 does: those with less than LOW_TURNS turns in ORIGINAL_POSITIONS are divided by it, those with more than
    HIGH_TURNS are left alone, those between are interpolated.
    """
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = ORIGINAL_POSITIONS * frequencies / (2 * math.pi)
    kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling)


@lru_cache(maxsize=8)
def _rotation(
    T: int, width: int, theta: float, scaling: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position, [T, 1, W] each: one table for all blocks and micro-batches."""
    positions = torch.arange(T, dtype=torch.float64)
    angles = positions[:, None, None] * rotary_frequencies(width, theta, scaling)  # [T, 1, W / 2]
    cosine = torch.cat([angles.cos(), angles.cos()], -1)
    sine = torch.cat([-angles.sin(), angles.sin()], -1)
    return cosine.to(device, dtype), sine.to(device, dtype)


def cast_once(x: Tensor) -> Tensor:
    """Under autocast x in its precision: else each of the matrices that read x would cast, and keep, its own copy."""
    kind = x.device.type
    active = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # meta has none
    return x.to(torch.get_autocast_dtype(kind)) if active else x


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D]; every H / K query heads share one head of keys and values.

    The number of heads is told from the width of what comes out of q and k: on a tensor-parallel rank it is smaller.
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.width = model.hidden // model.heads
        self.theta, self.scaling = model.rope_theta, model.rope_scaling
        shared = (model.key_value_heads or model.heads) * self.width
        self.q = nn.Linear(model.hidden, model.hidden, bias=False)
        self.k = nn.Linear(model.hidden, shared, bias=False)
        self.v = nn.Linear(model.hidden, shared, bias=False)
        self.projection = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """documents: [B, T] int64; None = every token sees all before it.

        Rotated scores depend on the distance of two tokens only, so positions need not start anew at each document:
        what a document's tokens see of each other is the same wherever it stands in the sequence.
        """
        x = cast_once(x)
        q, k, v = (part.unflatten(-1, (-1, self.width)) for part in (self.q(x), self.k(x), self.v(x)))
        q, k = self.rotate(q), self.rotate(k)  # [B, T, H, W], [B, T, K, W]
        mask = None
        if documents is not None:
            mask = attention_mask(documents)
            # torch's memory-efficient kernel on CUDA takes a mask but no shared heads: give each query head its own
            k, v = (part.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = fn.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        """[B, T, heads, W] with each head's two halves rotated by the angles of its position, in float32 or better."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cosine, sine = _rotation(x.shape[1], self.width, self.theta, self.scaling, dtype, x.device)
        return (x * cosine + x.roll(self.width // 2, -1) * sine).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): [B, T, D] -> twice [B, T, F], multiplied -> [B, T, D]."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(model.hidden, feedforward_width(model), bias=False)
        self.up = nn.Linear(model.hidden, feedforward_width(model), bias=False)
        self.down = nn.Linear(feedforward_width(model), model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = cast_once(x)
        return self.down(fn.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One Transformer block, [B, T, D] -> [B, T, D]; `layer` is its index in the model's list."""

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.attention = Attention(model)
        self.attention_dropout = Dropout(model.dropout, layer, site=0)
        self.feedforward_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.feedforward = FeedForward(model)
        self.feedforward_dropout = Dropout(model.dropout, layer, site=1)

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), documents), key)
        return x + self.feedforward_dropout(self.feedforward(self.feedforward_norm(x)), key)


class Norm(nn.RMSNorm):
    """The layer `norm`: [B, T, D] -> [B, T, D]."""

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(x)


def make_layer(model: ModelConfig, kind: str, layer: int) -> nn.Module:
    """The module of list entry number `layer`, of `kind` embedding, block, norm or head."""
    if kind == "block":
        return Block(model, layer)
    if kind == "norm":
        return Norm(model.hidden, eps=model.norm_eps)
    return TokenEmbedding(model) if kind == "embedding" else Head(model)
