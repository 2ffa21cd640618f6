"""How far the choice of `optimization=auto` is from the best of everything it could have chosen.

    python scripts/bench_auto.py [mlp cnn gpt] [--steps N] [--budget S] [--each S] [--json FILE]

For each model the search is made as in a run, without its cache. Then every candidate of its space
is measured against what it chose, in the same blocks, by the rule that the benchmark stops by; what
counts is the time of the whole run, compiling included. The shortfall is what the best candidate is
ahead by; to be within 5 %, or the noise floor, is what is promised.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.auto.choose import EVIDENCE, arms_in, resolved
from runner.benchmark.auto.look import look_at
from runner.benchmark.auto.search import AGAIN
from runner.benchmark.auto.space import space_of
from runner.benchmark.blocks import ArmEnded, Rule, run_blocks
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Crew
from runner.benchmark.statistics import noise_floor
from runner.build import Given
from runner.composing import compose

MODELS = {
    "mlp": ["data=synthetic", "data.form=tabular", "data.features=784", "model=mlp",
            "model.width=1024", "model.depth=2", "training.batch_size=256"],
    "cnn": ["data=synthetic", "data.form=images", "data.image_size=32", "model=cnn",
            "model.width=32", "training.batch_size=128"],
    "gpt": ["data=synthetic", "data.form=tokens", "data.sequence=256", "model=gpt",
            "model.width=256", "model.depth=4", "model.heads=4", "training.batch_size=8"],
}  # fmt: skip
PROMISED = 0.05
TOGETHER = 4  # candidates in a heat, besides the choice and itself again


@dataclass
class Compared:
    """A choice, and every other candidate by how many times as fast the run would be with it."""

    model: str
    chosen: str
    search_s: float
    noise_floor: float = 0.0
    others: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)  # of the search

    @property
    def best(self) -> str:
        """The candidate with which the run would be over first."""
        return max(self.others, key=lambda name: self.others[name])

    @property
    def shortfall(self) -> float:
        """By what share the best one is ahead; 0 where the choice is the best."""
        return max(0.0, self.others[self.best] - 1)

    @property
    def kept(self) -> str:
        """Whether the choice is within 5 %, or the noise floor, of the best: yes, NO, or not known
        where the best one is further ahead, but its interval reaches down to that.
        """
        floor = self.noise_floor if math.isfinite(self.noise_floor) else 0.0
        within = max(PROMISED, floor)
        if self.shortfall <= within:
            return "yes"
        return "NO" if self.intervals[self.best][0] > 1 + within else "not known"


def compare(
    model: str, overrides: Sequence[str], steps: int, budget_s: float, each_s: float
) -> Compared:
    """Search, then measure all of the space against what was chosen."""
    config = compose([
        *overrides, "optimization=auto", f"training.steps={steps}", "checkpoint=off",
        f"optimization.auto.budget_s={budget_s}", "optimization.auto.cache=false",
        "optimization.auto.advise=false",
    ])  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        resolved(config, Path(folder))
        evidence = json.loads((Path(folder) / EVIDENCE).read_text())
    chosen = str(evidence["chosen"])
    found = Compared(model, chosen, time.monotonic() - began, evidence=evidence)
    space = space_of(look_at(config, Given()).reasons, [], memory=False)
    arms = {arm.name: arm for arm in arms_in(config, space)}
    del arms[AGAIN]
    again = f"{chosen}, again"
    others = [name for name in arms if name != chosen]
    for start in range(0, len(others), TOGETHER):
        names = [chosen, again, *others[start : start + TOGETHER]]
        crew_arms = [Arm(name, arms[chosen if name == again else name].config) for name in names]
        with Crew(crew_arms, BenchmarkConfig(warmup_steps=5), None) as crew:
            setup: dict[str, float] = {}
            for name in names:
                try:
                    setup[name] = crew.start(name).setup_seconds
                except ArmEnded as error:
                    found.ended[name] = str(error)
            alive = [name for name in names if name in setup]
            measured = run_blocks(
                crew.turn, alive, chosen, Rule(0.02, each_s * len(alive)), 0.25, start,
                time.monotonic,
            )  # fmt: skip
        turns = measured.turns[chosen]
        own = steps * turns[0].samples / turns[0].steps * 1e-3
        own *= sorted(turn.per_sample_ms for turn in turns)[len(turns) // 2]
        if again in measured.estimates:
            found.noise_floor = max(found.noise_floor, noise_floor(measured.estimates[again]))
        for name in alive[2:]:
            extra = setup[name] - setup[chosen]
            e = measured.estimates[name]
            ratio, low, high = (
                own / max(1e-9, extra + own / r) if r > 0 else 0.0 for r in (e.ratio, e.low, e.high)
            )
            found.others[name], found.intervals[name] = ratio, (low, high)
    return found


def table(rows: Sequence[Compared]) -> str:
    """Markdown."""
    lines = ["| model | chosen | search s | next to it | times as fast | noise floor | kept |"]
    lines.append("|---|---|---:|---|---|---:|---|")
    for row in rows:
        low, high = row.intervals[row.best]
        lines.append(
            f"| {row.model} | {row.chosen} | {row.search_s:.0f} | {row.best} | "
            f"{row.others[row.best]:.2f} [{low:.2f}..{high:.2f}] | {row.noise_floor:.1%} | "
            f"{row.kept} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, of the search")
    parser.add_argument("--each", type=float, default=5.0, help="seconds, of each candidate")
    parser.add_argument("--json", type=Path)
    typed = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    rows = []
    for model in typed.models:
        rows.append(compare(model, MODELS[model], typed.steps, typed.budget, typed.each))
        print(f"{model}: {rows[-1].others} {rows[-1].ended}", file=sys.stderr)
    print(table(rows))
    if typed.json is not None:
        typed.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.kept == "NO" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
