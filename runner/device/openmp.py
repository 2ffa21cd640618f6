"""How OpenMP's threads wait: read from the environment when torch is loaded, so set before that."""

from __future__ import annotations

from collections.abc import Mapping

# How often OpenMP's threads look for work before they sleep. With its own 300,000 a step takes nine
# times as long beside one busy neighbour, with this three times (with a thread fewer 1.3 times).
# This costs nothing on a quiet machine, and fewer turns do. scripts/bench_neighbour.py measures it.
SPIN = "10000"
OWN_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def patience(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set besides; nothing where somebody has chosen."""
    return {} if any(key in environ for key in OWN_WAITING) else {"GOMP_SPINCOUNT": SPIN}
