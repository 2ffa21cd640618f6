"""Kills runs at random, and compares what they end with to runs that were not killed.

    python scripts/prove_crash.py [--kills 1000] [--jobs 2] [--modes MODE …] [--smoke]
    python scripts/prove_crash.py --calls [--stride 1]

SIGKILLs at moments drawn uniformly over the run's life, several in one run; the same command is
typed again until the run is done. Before some of them all processes of the run are stopped
(SIGSTOP) and continued; over ranks, some are stops of all ranks, which their agent has to end.
Weights, optimizer, average, loss scale, random state, guard, metrics.jsonl and TensorBoard must
equal those of the uninterrupted run, in twelve ways to train and in a typed relative folder
(tests/faults/modes.py), and planted defects of resuming must be noticed. With --calls: at every
file call of a short run a kill, a torn write, or an error of the disk. Exit code 1 otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # processes forked from this one import it again
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.faults.crash import main

    sys.exit(main())
