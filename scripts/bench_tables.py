"""Time and memory of reading a csv, by us and by pyarrow alone.

    python scripts/bench_tables.py [--rows 1000000] [--rounds 9]

The table has 21 columns: 16 of decimal numbers, 3 of whole numbers, 2 of texts. Each round reads it
once by `read_table` (to numpy arrays, with every cell checked) and once by `pyarrow.csv.read_csv`
(to arrow arrays), each in a process of its own, in turns. Time is CPU seconds of the process and
its threads; memory is how much the peak of the process grows over what it was before. Printed are
medians, and the ratio of each round: its median, and the smallest and largest.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIDES = ("ours", "pyarrow")
TARGET = "text1"


def write(path: Path, rows: int) -> None:
    """A csv of that many rows."""
    import numpy as np
    import pyarrow
    from pyarrow import csv

    rng = np.random.default_rng(0)
    columns = {f"decimal{i}": rng.normal(size=rows).round(6) for i in range(16)}
    columns |= {f"whole{i}": rng.integers(0, 1000, rows) for i in range(3)}
    columns |= {
        f"text{i}": np.array("red green blue".split())[rng.integers(0, 3, rows)] for i in range(2)
    }
    csv.write_csv(pyarrow.table(columns), path)


def read(side: str, path: str) -> None:
    """Read it, and print CPU seconds and bytes."""
    from pyarrow import csv

    from runner.core.schemas.data import Tabular
    from runner.datasets.table import read_table

    config = Tabular(path=path, target=TARGET)
    with tempfile.TemporaryDirectory() as folder:  # what is imported by the first read
        small = Path(folder) / "small.csv"
        small.write_text(f"a,{TARGET}\n1,x\n2,y\n")
        read_table(Tabular(path=str(small), target=TARGET), {"data.target": TARGET}, [])
    before, start = _peak(), time.process_time()
    if side == "ours":
        read_table(config, {"data.target": TARGET}, [])
    else:
        csv.read_csv(path)
    print(time.process_time() - start, _peak() - before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure in rounds, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)  # a side and a file
    parser.add_argument("--write", help=argparse.SUPPRESS)  # a file
    options = parser.parse_args()
    if options.write:
        return write(Path(options.write), options.rows)
    if options.read:
        return read(*options.read)
    measured: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        # in a process of its own: a child's peak begins at what its parent has
        script = [sys.executable, __file__, "--rows", str(options.rows)]
        subprocess.run([*script, "--write", str(path)], check=True)
        for number in range(options.rounds):
            for side in SIDES[:: 1 if number % 2 else -1]:
                answer = subprocess.run(
                    [*script, "--read", side, str(path)], check=True, capture_output=True, text=True
                )
                seconds, size = map(float, answer.stdout.split())
                measured[side].append((seconds, size))
        print(f"{options.rows:,} rows, 21 columns, {path.stat().st_size:,} bytes of csv")
    for place, (name, unit, scale) in enumerate((("CPU", "s", 1), ("memory", "MB", 1e6))):
        ours, theirs = ([values[place] for values in measured[side]] for side in SIDES)
        ratios = sorted(a / max(b, 1e-9) for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name}: ours {statistics.median(ours) / scale:,.2f} {unit}, "
            f"pyarrow {statistics.median(theirs) / scale:,.2f} {unit}, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
