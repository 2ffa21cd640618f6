"""Plants faults and looks for false alarms of job=verify: how many of each it finds.

    python scripts/parity_mutants.py [mutant or model …]

A mutant is a technique with one fault (tests/parity/parity_mutants.py). What is right are the
levels of `tests/parity/test_mutants.py` on nine models, those of transformers among them, and right
dropout by other random numbers. What is compared by statistics is made with three seeds. Exit
code 1 where a fault is missed or an alarm is false. All of them take some 20 minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "parity")]

from runner.parity.parity import Agreement, Parity  # noqa: E402
from tests.parity.test_mutants import (  # noqa: E402
    FAULTS,
    MODELS,
    RANDOM,
    SEEDS,
    draw_margin,
    judged_draws,
    judged_fault,
    judged_right,
)


def described(found: Parity) -> str:
    first = found.first
    if found.verdict is not Agreement.fail or first is None:
        return found.verdict.value
    return (
        f"FAIL: {first.kind} {first.name} at {first.step}: {first.error:.1e}, "
        f"explained {first.bound:.1e}"
    )


def main(names: Sequence[str]) -> int:
    """Print a line for each, and the two counts."""
    caught, alarms, right = 0, 0, 0
    faults = [fault for fault in FAULTS if not names or fault.mutant in names]
    planted = [(f, seed) for f in faults for seed in (SEEDS if f.kind == "draw" else SEEDS[:1])]
    for fault, seed in planted:
        start, found = time.perf_counter(), judged_fault(fault, seed)
        caught += found.verdict is Agreement.fail
        took = f"({time.perf_counter() - start:.0f} s)"
        margin = f"{draw_margin(found):.2f} of the limit " if fault.kind == "draw" else ""
        place = f"{fault.mutant:28} {fault.model:10} seed {seed}"
        print(f"{place} {described(found)} {margin}{took}", flush=True)
    for model in [name for name in MODELS if not names or name in names]:
        for level, found in judged_right(model).items():
            right, alarms = right + 1, alarms + (found.verdict is Agreement.fail)
            print(f"{model:28} {level:16} {described(found)}", flush=True)
    for model in [name for name in RANDOM if not names or name in names]:
        for seed in SEEDS:
            found = judged_draws(model, seed)
            right, alarms = right + 1, alarms + (found.verdict is Agreement.fail)
            margin = f"{draw_margin(found):.2f} of the limit"
            print(f"{model:28} other random numbers, seed {seed}: {margin}", flush=True)
    print(f"{caught} of {len(planted)} caught, {alarms} false alarms of {right}")
    return 0 if caught == len(planted) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
