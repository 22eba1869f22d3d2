"""Bytes of all tensors at the peak of a step through the engine's stages, as torch's (private) MemTracker counts."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.distributed._tools import mem_tracker

from conf.schema import RootConfig
from models.dropout import sample_keys
from pipeline.engines.base import Batch
from training.build import build_engine
from training.optimizer import make_optimizer


def tracked(rank: int, world: int, cases: list[RootConfig]) -> list[int]:
    """MemTracker's peak over the second step of each case, this rank's."""
    return [tracked_peak(rank, case) for case in cases]


def tracked_peak(rank: int, case: RootConfig) -> int:
    """Of one case."""
    engine = build_engine(case, rank=rank, device=torch.device("cpu"))
    optimizer = make_optimizer(case.optimizer, engine.parameters)
    rows, tokens = case.train.global_batch, case.train.sequence
    inputs, targets = torch.randint(case.model.vocabulary, (2, rows, tokens))
    keys = sample_keys(0, 0, torch.arange(rows)) if case.model.dropout else None
    batch = Batch(inputs if engine.needs_inputs else None, targets if engine.needs_targets else None, keys)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        engine.step(batch, 1 / inputs.numel())
        engine.sum_tied_gradients()
        optimizer.step()

    step()  # makes the optimizer's state and torch's buffers
    tracker = mem_tracker.MemTracker()
    # its statistics of modules take one forward at a time and no split backward; the totals need none of them
    nothing = {"register_user_hooks": lambda *_: None, "clear_user_hooks": lambda: None}
    tracker._mod_tracker = SimpleNamespace(**nothing, is_bw=False, __enter__=lambda: None, __exit__=lambda *_: None)
    tracker.track_external(*engine.stages.values(), optimizer, *_buffers(engine))
    with tracker:
        step()
    engine.close()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def _buffers(engine) -> list[torch.Tensor]:
    """What torch receives messages in: made before the tracker looks."""
    stages = [stage for runtime in getattr(engine, "_runtimes", {}).values() for stage in runtime._stages]
    infos = [
        info for stage in stages for group in (stage.args_recv_info, stage.grad_recv_info) for info in group.values()
    ]
    return [one.buffer for info in infos for one in info if isinstance(getattr(one, "buffer", None), torch.Tensor)]
