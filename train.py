"""Train one layout, `python train.py parallel=pp4 model=gpt_1b`, or many, `python train.py -m parallel.stages=1,2,4`.

Composes conf/ with what is typed, checks it, starts one process a rank and leaves a run folder in experiments/NAME/.
`--help` lists the groups, `--cfg job` prints the configuration. Under torchrun it joins the ranks that are there.

Exit codes: 0 completed (also when train.max_minutes ended it); 1 failed or out of memory, or a sweep with such a job;
2 bad input, nothing started; 75 stopped by a signal, run it again.
"""

import sys

import hydra
from omegaconf import DictConfig

from training import command
from training.sweep import Job


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(command.help_text(__doc__))
        return 0
    jobs: list[Job] = []  # one; with -m one each

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def compose_and_run(config: DictConfig) -> None:
        command.run(config, jobs)  # a launcher that runs it elsewhere imports training.command for this name

    return command.main(compose_and_run, jobs)


if __name__ == "__main__":
    sys.exit(main())
