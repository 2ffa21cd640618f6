"""Whether a set of techniques leaves the numbers right: real steps, held against the plain run.

>>> from runner.measure.parity import parity
>>> found = parity(config, baseline)
>>> found.verdict, found.first
"""

from __future__ import annotations

from dataclasses import replace

from runner.config import RunConfig
from runner.measure.candidates import only, without_techniques
from runner.measure.verdict import Agreement, Parity, Row
from runner.measure.yardstick import STEPS, Yardstick

__all__ = [
    "STEPS", "Agreement", "Parity", "Row", "Yardstick", "only", "parity", "without_techniques",
]  # fmt: skip


def parity(
    config: RunConfig, baseline: RunConfig, steps: int | None = None, attribute: bool = False
) -> Parity:
    """Hold the run of `config` against that of `baseline`, each step from the same weights.

    `STEPS` steps, or as many as are affordable with a large model; what `Yardstick.judge` says of
    it. With `attribute` a failure is traced to the technique that causes it.
    """
    yardstick = Yardstick(baseline, steps)
    found = yardstick.judge(config)
    if attribute and found.verdict is Agreement.fail:
        return _attributed(yardstick, config, found)
    return found


def _attributed(yardstick: Yardstick, config: RunConfig, found: Parity) -> Parity:
    """Name what fails alone; if nothing does, shrink the set for as long as it fails."""
    names = found.techniques
    if len(names) == 1:
        return replace(found, culprits=names)
    verdicts = {name: yardstick.judge_once(only(config, [name])).verdict for name in names}
    culprits = [name for name, verdict in verdicts.items() if verdict is Agreement.fail]
    if not culprits:
        culprits = list(names)
        for name in names:
            rest = [n for n in culprits if n != name]
            if rest and yardstick.judge_once(only(config, rest)).verdict is Agreement.fail:
                culprits = rest
    alone = {name: verdict.value for name, verdict in verdicts.items()}
    return replace(found, culprits=culprits, alone=alone)
