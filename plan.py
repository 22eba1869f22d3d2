"""Ask before paying: `python plan.py model=gpt3_175b parallel=megatron_8x4x16 hardware=a100_80gb` predicts a run.

Memory of each rank, the step and what it goes into, hours, dollars, warnings, from the configuration that train.py
takes. `points=table.csv` predicts a table of layouts. Runs nothing, needs no accelerator, imports no torch.

Exit codes: 0 predicted (also when it would not fit); 2 bad input.
"""

import sys

import hydra
from omegaconf import DictConfig

from planning import front


def main() -> int:
    @hydra.main(version_base="1.3", config_path="conf", config_name="plan")
    def compose_and_plan(config: DictConfig) -> None:
        front.run(config)

    return front.main(compose_and_plan)


if __name__ == "__main__":
    sys.exit(main())
