"""train.py as it is, but its ranks run fake_worker.py: for tests of the front that need no training."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import train
from training import front

if os.environ.get("FAKE_PREPARE") == "slow":
    front.prepare = lambda *_, **__: time.sleep(60)
front.launch = partial(front.launch, worker=(str(Path(__file__).parent / "fake_worker.py"),))
sys.exit(train.main())
