"""The benchmark's own scripts run: smallest sizes, real output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.mark.slow
def test_every_benchmark_runs_and_prints_its_table() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_all.py"), "--smoke"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        *("| typo in a key / import torch |", "| tiny | none |", "| heavy-tailed 2 % |"),
        *("1,000 rows, 21 columns", "| tiny | control", "sha256"),
    ):
        assert row in done.stdout, row
