"""The single engine's optimizer step against a plain PyTorch loop over the same layers, batch and threads.

    python benchmarks/single/run.py

Both take the same micro-batches, clip by the global norm and step AdamW; they alternate in one process. Prints the
medians, and the median and spread of the ratio of neighbouring steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as fn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import models
from conf.resolve import resolve
from conf.schema import RootConfig, register
from training.data import prepare
from training.loop import Trainer
from training.ranks import Ranks

REPEATS, WARMUP = 31, 4


def configuration() -> RootConfig:
    """`python train.py parallel=single`, as composed and resolved."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = resolve(OmegaConf.to_object(compose("config", ["parallel=single", *sys.argv[1:]])), device="cpu")
    config.parallel.balance = "uniform"
    return config


class Plain:
    """What one would write without this project."""

    def __init__(self, config: RootConfig):
        layers = models.build(config.model, seed=config.train.seed)
        self.module = torch.nn.ModuleList(module for _, module in layers)
        if config.model.tied:
            self.module[-1].weight = self.module[0].token.weight
        self.chunks, self.clip = config.parallel.chunks, config.optimizer.clip_norm
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=config.optimizer.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )

    def step(self, inputs, targets) -> None:
        self.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(self.chunks), targets.chunk(self.chunks), strict=True):
            for module in self.module:
                x = module(x)
            (fn.cross_entropy(x.flatten(0, 1), y.flatten()) / self.chunks).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()


def main() -> None:
    config = configuration()
    corpus = prepare(config.data, sequence=config.train.sequence)
    ours = Trainer(config, Ranks(0, 1, 0, torch.device("cpu")), corpus, lambda: False)
    plain = Plain(config)
    inputs, targets = map(torch.from_numpy, ours.batches.train(0, config.train.global_batch))
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for repeat in range(WARMUP + REPEATS):
        for name in ("ours", "plain") if repeat % 2 else ("plain", "ours"):
            start = time.perf_counter()
            if name == "ours":
                ours.step(0)  # reads its batch itself, and gathers the figures that are logged
            else:
                plain.step(inputs, targets)
            if repeat >= WARMUP:
                times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        print(f"{name:<5} {statistics.median(values) * 1e3:.1f} ms [{min(values) * 1e3:.1f}..{max(values) * 1e3:.1f}]")
    ratios = sorted(a / b for a, b in zip(times["ours"], times["plain"], strict=True))
    quarter = len(ratios) // 4
    half = f"middle half {ratios[quarter]:.3f}..{ratios[-1 - quarter]:.3f}"
    median = statistics.median(ratios)
    print(f"ours / plain: median {median:.3f}, {half}, n = {len(ratios)}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
