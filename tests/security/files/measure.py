"""Examines files in this one process: a line of JSON for each, with the time and memory it took.

    python measure.py FILE…

Memory is what the process grew by at its peak, besides the file itself. A file that takes longer
than a minute ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from runner.security.gate.examine import examine
from runner.security.gate.policy import Policy

MINUTE = 60
SPACE = 8 << 30  # bytes of addresses; far beyond what any of them may take


def peak() -> float:
    """Megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    for text in sys.argv[1:]:
        path = Path(text)
        data = path.read_bytes()
        signal.alarm(MINUTE)
        before, start = peak(), time.monotonic()
        found = examine(data, path.name, Policy())
        row = {
            "name": path.parent.name,
            "refused": found.refused,
            "seconds": round(time.monotonic() - start, 2),
            "megabytes": round(peak() - before),
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
