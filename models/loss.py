"""The loss of a language model.

Shape letters: B micro-batch size, T sequence, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as fn
from torch import Tensor

IGNORED = -100  # a target that counts for nothing: of the sequences that fill up a data rank's share


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens of the cross-entropy, nats: logits [B, T, V], targets [B, T] int64 -> scalar.

    In float32 whatever the logits' precision (float64 for float64). A sum, so that the caller scales once, by tokens.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return fn.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
