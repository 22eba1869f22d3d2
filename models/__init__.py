"""A model as an ordered list of named layers. `models.describe` needs no torch; the rest is imported when asked for."""

from importlib import import_module

_HOME = {"build": "models.initial", "sample_keys": "models.dropout", "token_loss": "models.loss"}

__all__ = ["build", "sample_keys", "token_loss"]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'models' has no attribute '{name}'")
