"""What can be told of activation checkpointing under a schedule, in one line each: what is refused, what it costs."""

from __future__ import annotations

from functools import cache

from conf.schema import ParallelConfig, RootConfig


def check_selective(parallel: ParallelConfig) -> None:
    """What plan.py plans and train.py has no use for."""
    if parallel.checkpoint == "selective":
        raise ValueError(
            "train.py does not run parallel.checkpoint=selective, and has no need to: its attention is fused and keeps "
            "no scores; plan.py plans it; train with never, except_last or always"
        )


def split_recomputation(config: RootConfig) -> str | None:
    """A warning where blocks are recomputed and backwards are in two parts, I and W: of a resolved configuration."""
    parallel = config.parallel
    if parallel.checkpoint == "never" or not splits_backward(parallel):
        return None
    again = forwards_again(config)
    return (  # memory: benchmarks/planner/README.md; forwards: tests/test_torch_runtime.py
        f"parallel.checkpoint={parallel.checkpoint} saves no memory with parallel.schedule={parallel.schedule} and "
        f"costs time: for a backward in two parts torch runs a block's forward up to {again} times again, "
        f"{1 + again / 3:.1f} x the arithmetic of parallel.checkpoint=never, and keeps it "
        "all: use that, or a schedule with whole backwards such as 1f1b"
    )


def splits_backward(parallel: ParallelConfig) -> bool:
    """Whether some backwards of the schedule are in two parts, I and W."""
    return parallel.engine == "torch" and _splits(
        parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave
    )


@cache  # a plan asks for the same one many times
def _splits(schedule: str, stages: int, chunks: int, interleave: int) -> bool:
    from pipeline.schedule import make_schedule

    return make_schedule(schedule, stages, chunks, interleave).splits_backward


def forwards_again(config: RootConfig) -> int:
    """How often torch (2.13) runs a recomputed block's forward again where I and W are apart: for I, and in W for each
    module with weights among the blocks that are recomputed together. Of the first stage, which has no I, it is one."""
    from models.describe import describe

    parallel = config.parallel
    block = next(layer for layer in describe(config.model) if layer.kind == "block")
    modules = {name.rpartition(".")[0] for name in block.parameters}
    together = min(parallel.checkpoint_interval, -(-config.model.blocks // (parallel.stages * parallel.interleave)))
    return 1 + together * len(modules)
