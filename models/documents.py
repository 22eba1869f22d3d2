"""Attention that does not cross documents, where several are packed into one sequence.

Shape letters: B micro-batch size, T sequence.
"""

from __future__ import annotations

from torch import Tensor


def attention_mask(documents: Tensor) -> Tensor:
    """Who may look at whom: [B, T] int64, the number of each token's document -> [B, 1, T, T] bool.

    True at [b, 0, i, j] where token i may attend to token j: j is in i's document and not after i. Every token sees
    itself, so no row is empty. For scaled_dot_product_attention's attn_mask, in place of is_causal.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril_()[:, None]
