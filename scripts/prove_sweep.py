"""A sweep of 200 jobs, of which 20 are broken in 10 ways; its process is killed, and begun again.

    python scripts/prove_sweep.py [--jobs 200] [--kills 5] [--seed 0] [--smoke]

An exception, a segmentation fault, os._exit, SIGKILL, a hang, lack of memory, a bad value in the
config, a missing file, NaN weights and a full disk (tests/faults/broken_job.py). All other jobs
must have their result, each broken one its reason, and no process may be left over. Exit code 1
otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.faults.sweep import main

    sys.exit(main())
