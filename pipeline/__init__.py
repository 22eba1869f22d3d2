"""Cutting a list of layers into stages and running micro-batches through them; imports nothing until it is asked."""


def __getattr__(name: str):
    if name == "Pipe":  # lazily: it needs torch, and `python -m pipeline.schedule` must answer at once
        from pipeline.pipe import Pipe

        return Pipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
