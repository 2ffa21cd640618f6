"""Damages the newest checkpoint of a run in many ways; each must be refused.

    python scripts/prove_corruption.py [--mutants 10000] [--seed 0] [--smoke]

Flipped bits, truncated and extended files, zeroed, swapped and doubled blocks, swapped, older,
missing and linked files, edits of the manifest (tests/faults/corruption.py). The checkpoint must be
named in a warning and the one before it restored, bit for bit. Exit code 1 otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.faults.corruption import main

    sys.exit(main())
