"""Measures small pieces of a Transformer on this machine: planning/calibrate.py's child process, which imports torch.

    python -m planning.probe        says that it is ready, then takes and gives lines of JSON:
        {"shapes": [...], "threaded": index}                    -> {"pieces": [...], "bytes_per_s": ...}
        {"threads": n}, once nothing else is measured           -> {"thread_efficiency": ...}
        {"rank": 0 or 1, ...}, two children at once             -> what planning/probe_ranks.py measures

Answers for each model configuration with batch and sequence the seconds of forward and backward of one block (in a row
of blocks, as a stage runs it) and of norm, head and loss, with one thread; the bytes a second that an optimizer moves;
and, with n > 1, how n threads do beside one. Medians, in time of the processor and not of the clock, so that other work
on the machine counts least; with n threads, which wait for each other by spinning, that is n times the clock's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from conf.device import keep_large_tensors_apart
from conf.schema import ModelConfig, from_dict

SECONDS_EACH = 0.15  # spent on a piece
LEAST_REPEATS = 3
UPDATED = 8_000_000  # elements: four tensors of 32 MB, larger than the caches of a core
MOVED = 28  # bytes that fused AdamW reads and writes for each


def main() -> None:
    import torch

    torch.set_num_threads(1)
    keep_large_tensors_apart()  # as in the ranks of a run
    print("ready", flush=True)
    asked = json.loads(sys.stdin.readline())
    answer: dict = {"pieces": [_pieces(shape) for shape in asked["shapes"]]}
    parameter = torch.nn.Parameter(torch.zeros(UPDATED))
    parameter.grad = torch.ones(UPDATED)
    answer["bytes_per_s"] = MOVED * UPDATED / _median(torch.optim.AdamW([parameter], fused=True).step)
    print(json.dumps(answer), flush=True)
    while line := sys.stdin.readline():
        more = json.loads(line)
        if "rank" in more:
            from planning.probe_ranks import measure

            print(json.dumps(measure(more)), flush=True)
        else:
            shape = asked["shapes"][asked["threaded"]]
            alone = _pieces(shape, head=False)["block"]  # beside the others, which share the memory, it took longer
            torch.set_num_threads(more["threads"])
            print(json.dumps({"thread_efficiency": alone / _pieces(shape, head=False)["block"]}), flush=True)
            torch.set_num_threads(1)


def _pieces(shape: dict, *, head: bool = True) -> dict[str, float]:
    import torch

    import models

    model = from_dict(shape["model"], ModelConfig)
    layers = [module for _, module in models.build(model, seed=0, start=1)]
    x = torch.randn(shape["batch"], shape["sequence"], model.hidden, requires_grad=True)
    targets = torch.randint(model.vocabulary, (shape["batch"], shape["sequence"]))
    gradient = torch.ones_like(x)

    def run(layers: list, end) -> None:
        y = x
        for layer in layers:
            y = layer(y)
        end(y)

    blocks = _median(lambda: run(layers[:-2], lambda y: y.backward(gradient)))
    seconds = {"block": blocks / model.blocks}
    if head:
        seconds["head"] = _median(lambda: run(layers[-2:], lambda y: models.token_loss(y, targets).backward()))
    return seconds


def _median(piece) -> float:
    piece()
    times, end = [], time.process_time() + SECONDS_EACH
    while time.process_time() < end or len(times) < LEAST_REPEATS:
        start = time.process_time()
        piece()
        times.append(time.process_time() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
