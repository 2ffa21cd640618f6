"""How far the choice of `optimization=auto` is from the best of everything it could have chosen.

    python scripts/bench_auto.py [mlp cnn gpt] [--steps N] [--budget S] [--each S]

For each model the search is made as in a run, without its cache. Then every candidate is measured
against what it chose, in the same blocks, by the benchmark's stopping rule; what counts is the time
of the whole run, compiling included. To be within 5 % of the best, or the noise floor, is promised.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runner.core.build.setup import Components  # noqa: E402
from runner.core.config.composing import compose  # noqa: E402
from runner.core.schemas.jobs import BenchmarkConfig  # noqa: E402
from runner.measure.auto.resolve import EVIDENCE_FILE, estimate_run, make_arms, resolve_auto
from runner.measure.auto.search import make_candidates  # noqa: E402
from runner.measure.benchmark.arms import Arm  # noqa: E402
from runner.measure.benchmark.rounds import MeasureOptions, run_round  # noqa: E402
from runner.measure.benchmark.statistics import noise_floor  # noqa: E402

SYNTHETIC = ["data=synthetic", "checkpoint=off", "optimization=auto"]
MODELS = {
    "tiny": ["data.form=tabular", "model=mlp", "model.width=8"],
    "mlp": ["data.form=tabular", "data.features=784", "model=mlp", "model.width=1024"],
    # small, so that the search's budget holds a thousand steps on two cores
    "cnn": ["data.form=images", "model=cnn", "model.width=16", "training.batch_size=16"],
    "gpt": ["data.form=tokens", "model=gpt", "data.sequence=64", "training.batch_size=4"],
}
PROMISED = 0.05
TOGETHER = 4  # candidates in a round, besides the choice and its control
AGAIN = "choice, again"


@dataclass
class Comparison:
    """A choice, and the speed of the whole run with every other candidate, next to it."""

    model: str
    chosen: str
    search_s: float
    noise_floor: float = 0.0
    others: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The candidate with which the run would be over first."""
        return max(self.others, key=lambda name: self.others[name], default=self.chosen)

    @property
    def kept(self) -> str:
        """Whether the choice is within 5 %, or the noise floor, of the best: yes, NO, not known."""
        within = 1 + max(PROMISED, self.noise_floor)
        if self.others.get(self.best, 1.0) <= within:
            return "yes"
        return "NO" if self.intervals[self.best][0] > within else "not known"

    def row(self) -> str:
        """A line of the table, in Markdown."""
        low, high = self.intervals.get(self.best, (1.0, 1.0))
        ahead = f"{self.others.get(self.best, 1.0):.2f} [{low:.2f}..{high:.2f}]"
        cells = [self.model, self.chosen, f"{self.search_s:.0f}", self.best, ahead]
        return f"| {' | '.join([*cells, f'{self.noise_floor:.1%}', self.kept])} |"


def compare(model: str, steps: int, budget_s: float, each_s: float) -> Comparison:
    """Search, then measure every candidate against the choice."""
    auto = [f"optimization.auto.budget_s={budget_s}", "optimization.auto.cache=false"]
    config = compose([*SYNTHETIC, *MODELS[model], f"training.steps={steps}", *auto])
    with tempfile.TemporaryDirectory() as folder:
        resolve_auto(config, Path(folder))
        evidence = json.loads((Path(folder) / EVIDENCE_FILE).read_text())
    found = Comparison(model, str(evidence["chosen"]), evidence["seconds"])
    candidates = make_candidates(estimate_run(config, Components()).exclusions)
    arms = {arm.name: arm for arm in make_arms(config, candidates)}
    del arms["none again"]
    choice = arms.pop(found.chosen)
    for start in range(0, len(arms), TOGETHER):
        some = list(arms.values())[start : start + TOGETHER]
        measure(found, [choice, Arm(AGAIN, choice.config), *some], steps, each_s)
    return found


def measure(found: Comparison, arms: Sequence[Arm], steps: int, each_s: float) -> None:
    """One round: note the arms' speeds next to the first one's."""
    how = MeasureOptions(BenchmarkConfig(warmup_steps=5))
    heat = run_round(arms, arms[0].name, each_s * len(arms), 0, how)
    found.ended |= {name: str(error) for name, error in heat.failures.items()}
    turns = heat.measurements.turns.get(found.chosen) or []
    if not turns:
        return
    own = steps * median(1e-3 * turn.per_sample_ms * turn.samples / turn.steps for turn in turns)
    if (control := heat.ratio([found.chosen], [AGAIN])) is not None:
        found.noise_floor = max(found.noise_floor, noise_floor(control))
    for arm in arms[2:]:
        if (ratio := heat.ratio([found.chosen], [arm.name])) is not None:
            extra = heat.setups[arm.name].setup_seconds - heat.setups[found.chosen].setup_seconds
            low, middle, high = (
                own / max(1e-9, extra + own / r) for r in (ratio.low, ratio.ratio, ratio.high)
            )
            found.others[arm.name], found.intervals[arm.name] = middle, (low, high)


def main() -> int:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["mlp", "cnn", "gpt"])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds, of the search")
    parser.add_argument("--each", type=float, default=5.0, help="seconds, of each candidate")
    typed = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    rows = [compare(model, typed.steps, typed.budget, typed.each) for model in typed.models]
    print("| model | chosen | search s | next to it | times as fast | noise floor | kept |")
    print("|---|---|---:|---|---|---:|---|", *(row.row() for row in rows), sep="\n")
    return 1 if any(row.kept == "NO" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
