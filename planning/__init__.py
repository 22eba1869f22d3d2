"""Predictions from the same config that a run reads: memory, time, cost. Imports no torch.

planning.predict(config)              figures under result.json's names
planning.errors(predicted, measured)  predicted / measured - 1
"""

from planning.predict import errors, predict

__all__ = ["errors", "predict"]
