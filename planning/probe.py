"""Measures small pieces of a Transformer on this machine: planning/calibrate.py's child process, which imports torch.

    python -m planning.probe < shapes.json > seconds.json

Reads a list of model configurations with batch and sequence; answers, for each, the seconds of forward and backward of
one block, and of norm, head and loss, with one thread: the fastest of the repeats, in time of the processor and not of
the clock, so that other work on the machine counts least.
"""

from __future__ import annotations

import json
import sys
import time

from conf.schema import ModelConfig, from_dict

SECONDS_EACH = 0.15  # spent on a piece
LEAST_REPEATS = 4


def main() -> None:
    import torch

    import models

    torch.set_num_threads(1)
    answers = []
    for shape in json.load(sys.stdin):
        model = from_dict(shape["model"], ModelConfig)
        layers = [module for _, module in models.build(model, seed=0, start=1)]
        x = torch.randn(shape["batch"], shape["sequence"], model.hidden, requires_grad=True)
        targets = torch.randint(model.vocabulary, (shape["batch"], shape["sequence"]))

        def block(layers=layers, x=x) -> None:
            layers[0](x).sum().backward()

        def head(layers=layers, x=x, targets=targets) -> None:
            y = x
            for layer in layers[1:]:
                y = layer(y)
            models.token_loss(y, targets).backward()

        answers.append({"block": _fastest(block), "head": _fastest(head)})
    print(json.dumps(answers))


def _fastest(piece) -> float:
    piece()
    times, end = [], time.process_time() + SECONDS_EACH
    while time.process_time() < end or len(times) < LEAST_REPEATS:
        start = time.process_time()
        piece()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
