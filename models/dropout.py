"""Dropout as a pure function of (seed, step, sample, layer, site, position): the same mask for every cut and dtype.

Torch's own dropout draws from a generator whose state depends on what ran before it in the process, so cutting the
model differently would change the masks. Here each mask element is a hash of its coordinates, in integer arithmetic
that wraps, which gives the same bits on every device.

Shape letters: B micro-batch size, T sequence, D model (hidden), W = D / 2 rounded up (32-bit words of a row).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn


def _signed(value: int, bits: int) -> int:
    """`value` modulo 2^bits as torch's signed integers hold it."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# splitmix64 (Steele, Lea and Flood, OOPSLA 2014): increment and the two multipliers of its finaliser
_INCREMENT = _signed(0x9E3779B97F4A7C15, 64)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9, 64)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB, 64)
_MULTIPLIER_32 = 0x2C1B3C6D  # odd, of the 32-bit hash "lowbias32" family (Wellons, hash-prospector)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64; torch shifts int64 arithmetically, hence the masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """One int64 key for each sample: [B] consumed-sample numbers -> [B] keys, on the samples' device."""
    key = torch.full_like(samples, _signed(seed * _INCREMENT, 64), dtype=torch.int64)
    key = _mix(key + _INCREMENT) + _signed(step * _INCREMENT, 64)
    return _mix(_mix(key) + samples * _INCREMENT)


@lru_cache(maxsize=16)
def _column_words(num_words: int, device: torch.device) -> Tensor:
    """A random int32 for each pair of columns: [W]."""
    words = torch.arange(1, num_words + 1, dtype=torch.int64, device=device) * _INCREMENT
    return _mix(words).to(torch.int32)


def keep_mask(key: Tensor, layer: int, site: int, T: int, D: int, dropped: int, first: int = 0) -> Tensor:
    """Which elements stay: [B] int64 keys -> [B, T, D] bool, each element False with probability dropped / 65536.
    `first`: the sequence's position that row 0 is.

    A row (sample, layer, site, t) has 64 hashed bits and a pair of columns has 32; two rounds of multiply and fold join
    them into a 32-bit word, whose halves decide two neighbouring columns: half the arithmetic of a word for each.
    """
    place = _mix(key + _signed((2 * layer + site + 1) * _MULTIPLIER_1, 64))
    positions = torch.arange(first, first + T, dtype=torch.int64, device=key.device) * _INCREMENT
    row = _mix(place[:, None] + positions)[:, :, None]  # [B, T, 1]
    word = row.to(torch.int32) ^ _column_words((D + 1) // 2, key.device)  # [B, T, W]
    word *= _MULTIPLIER_32
    word += word >> 16  # the high half into the low one; added, since with an arithmetic shift xor would lose the sign
    word *= (row >> 32).to(torch.int32) | 1
    word += word >> 16
    return (word.view(torch.int16) >= dropped - 32768)[:, :, :D]


class Dropout(nn.Module):
    """Zeroes elements with `probability`, in steps of 1 / 65536, and scales the others to keep the mean.

    Without a key it passes x on. `layer` is the index in the model's list and `site` (0 or 1) the place in the layer.
    """

    def __init__(self, probability: float, layer: int, site: int):
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"dropout={probability} must be at least 0 and less than 1")
        self.dropped = min(round(probability * 65536), 65535)
        self.layer, self.site = layer, site
        self.part = 0  # under sequence parallelism: which part of the sequence x is, of parts as long as x

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        """[B, T, D], [B] int64 -> [B, T, D]."""
        if key is None or self.dropped == 0:
            return x
        keep = keep_mask(key, self.layer, self.site, x.shape[1], x.shape[2], self.dropped, self.part * x.shape[1])
        # a bool mask: autograd keeps one byte an element; in place: fresh pages cost more than the product itself
        return (x * keep).mul_(65536 / (65536 - self.dropped))

    def extra_repr(self) -> str:
        return f"probability={self.dropped / 65536:.4g}, layer={self.layer}, site={self.site}"
