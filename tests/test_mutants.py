"""The list of planted breaks fits the code; that each is caught is shown by scripts/nightly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_planted_break_has_its_text_once_and_its_tests() -> None:
    script = Path(__file__).parents[1] / "scripts" / "mutants.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
