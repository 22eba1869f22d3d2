"""Prove a configuration on CPU: `python verify.py parallel=pp4` compares its gradient with plain autograd's.

Loss, every parameter's gradient, the global norm and the weights after one step of plain SGD, in float64.
Takes what train.py takes; `verify.all=true` runs every schedule and cut. Leaves nothing behind.

Exit codes: 0 all within verify.tolerance; 1 beyond it, or a rank failed; 2 bad input; 75 stopped by a signal.
"""

import sys

import hydra
from omegaconf import DictConfig

from training import command, verification


def main() -> int:
    failed: list[bool] = []

    @hydra.main(version_base="1.3", config_path="conf", config_name="verify")
    def compose_and_verify(config: DictConfig) -> None:
        failed.append(not verification.run(config))

    return command.main(compose_and_verify, []) or int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
