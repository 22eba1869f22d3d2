"""Predicted bytes of every rank's tensors against what torch's MemTracker counts in a real step of its stages."""

from __future__ import annotations

import dataclasses

import pytest

from cases import config
from conf.schema import OptimizerConfig, RootConfig
from planning.balance import resolved_balance
from planning.predict import ranks_memory
from planning.step import Layout
from ranks import run_ranks

pytest.importorskip("torch.distributed._tools.mem_tracker", reason="torch moved its private MemTracker")

from tracking import tracked, tracked_peak  # noqa: E402  (it imports that)


def case(width: int = 64, tokens: int = 32, vocabulary: int = 500, **changes) -> RootConfig:
    """float32 and AdamW; large enough that no figure is a matter of single tensors."""
    small = config(**{"stages": 2, "blocks": 4, "precision": "float32"} | changes)
    model = dataclasses.replace(
        small.model, hidden=width, heads=4, feedforward=4 * width, positions=tokens, vocabulary=vocabulary
    )
    train = dataclasses.replace(small.train, sequence=tokens)
    optimizer = OptimizerConfig(name="adamw", learning_rate=1e-3, warmup_steps=0)
    return dataclasses.replace(small, model=model, train=train, optimizer=optimizer)


SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2), ("zb_h1", 1), ("zb_v", 2)]
SCHEDULES += [("dualpipe_v", 2)]
CASES = {
    f"{schedule} {checkpoint}": case(schedule=schedule, checkpoint=checkpoint, interleave=interleave)
    for schedule, interleave in SCHEDULES
    for checkpoint in ("never", "always")
} | {
    "1f1b except_last": case(checkpoint="except_last"),
    "gpipe except_last": case(schedule="gpipe", checkpoint="except_last"),
    "dropout": case(dropout=0.1),
    "large vocabulary": case(vocabulary=4000, tokens=16),
    "many tokens": case(vocabulary=32, tokens=64, microbatch=4),
    "untied": case(tied=False, chunks=8),
    "zb_v, more blocks": case(schedule="zb_v", checkpoint="always", interleave=2, blocks=8, tokens=64),
    "zb_h1, more blocks": case(schedule="zb_h1", checkpoint="always", blocks=8, vocabulary=64),
    "zb_h1, pairs": case(schedule="zb_h1", checkpoint="always", blocks=8, interval=2),
    "zb_h1, llama": case(schedule="zb_h1", checkpoint="always", family="llama"),
}


@pytest.fixture(scope="module")
def peaks() -> dict[str, list[int]]:
    """Of every case, one number a rank; all in one launch."""
    found = run_ranks(tracked, 2, list(CASES.values()))
    return {name: [rank[index] for rank in found] for index, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_a_pipelined_step(peaks, name):
    """Within 5 %: weights, gradients, optimizer, activations, logits, messages and temporary tensors at the peak."""
    planned = resolved_balance(CASES[name])[0]
    for rank, parts in enumerate(ranks_memory(planned, Layout.of(planned))):
        tensors = parts["total"] - parts["allocator"] - parts["runtime"]
        print(f"{name} rank {rank}: {tensors / peaks[name][rank] - 1:+.1%}")
        assert tensors == pytest.approx(peaks[name][rank], rel=0.05)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_tensors_of_a_step_in_one_process(checkpoint):
    one = case(engine="single", stages=1, checkpoint=checkpoint)
    planned = resolved_balance(one)[0]
    (parts,) = ranks_memory(planned, Layout.of(planned))
    assert parts["total"] - parts["allocator"] - parts["runtime"] == pytest.approx(tracked_peak(0, one), rel=0.05)
