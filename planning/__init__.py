"""Predictions from the same config that a run reads: memory. Imports no torch."""
