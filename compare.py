"""Which run won, and why: `python compare.py experiments/NAME` compares finished, running and failed runs.

Prints a table with only the columns that differ, and writes beside the runs results.csv (a row a run), curves.csv
(the losses), crossover.csv (where each schedule wins) and compare.html: one page, no network, opens in any browser.

  python compare.py experiments/NAME --sort step_time_s --where parallel.schedule=1f1b
  python compare.py experiments/A experiments/B/RUN
  python compare.py --diff experiments/NAME/RUN_A experiments/NAME/RUN_B

Reads run folders only, also while runs go on; imports neither torch nor TensorBoard.
Exit codes: 0; 2 bad input (no such folder, no runs, an unknown key).
"""

import sys

from comparing import front

if __name__ == "__main__":
    sys.exit(front.main(sys.argv[1:], __doc__))
