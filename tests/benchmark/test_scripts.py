"""The benchmark's own scripts run: smallest sizes, real output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("bench_overhead.py tiny --rounds 1 --steps 12 --levels none", "| tiny | none |"),
        ("bench_distributed.py tiny --rounds 1 --steps 12", "| tiny | none |"),
        ("bench_statistics.py --runs 2 --blocks 10", "| heavy-tailed 2 % |"),
        ("bench_tables.py --rows 1000 --rounds 1", "1,000 rows, 21 columns"),
        ("bench_auto.py tiny --steps 50 --each 0.5", "| tiny |"),
    ],
)
def test_a_benchmark_script_runs_and_prints_its_table(command: str, row: str) -> None:
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert row in done.stdout, done.stderr[-2000:]
