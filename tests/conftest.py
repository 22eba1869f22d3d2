"""Settings of every test: one thread for arithmetic, as the ranks of a run have it."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_sessionfinish():
    """The fork server of tests/ranks.py would outlive this process by a moment: no test leaves a process behind."""
    from multiprocessing import forkserver, resource_tracker

    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
