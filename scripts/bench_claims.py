"""Test published claims about techniques (`claims.yaml`) here; prints docs/measured/claims.md.

    python scripts/bench_claims.py [NAME …] [--device D] [--budget S] [--narrow N] [--write]

A claim that this machine cannot test is reported with the reason; a failed trial affects its rows.
"""

from __future__ import annotations

import argparse
import logging
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
import yaml  # type: ignore[import-untyped]  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402

from runner.core.config.composing import compose  # noqa: E402
from runner.core.device import memory  # noqa: E402
from runner.core.device.signals import raise_on_signals  # noqa: E402
from runner.core.errors import RunnerError  # noqa: E402
from runner.core.interfaces.batch import call_model  # noqa: E402
from runner.core.interfaces.run import Run  # noqa: E402
from runner.core.models import modes  # noqa: E402
from runner.core.record import provenance  # noqa: E402
from runner.core.record.markdown import code, escape, table  # noqa: E402
from runner.core.schemas.jobs import BenchmarkConfig  # noqa: E402
from runner.core.techniques.probe import dry_run_step  # noqa: E402
from runner.measure.benchmark.arms import Arm  # noqa: E402
from runner.measure.benchmark.blocks import INTERRUPTED  # noqa: E402
from runner.measure.benchmark.result import machine_facts  # noqa: E402
from runner.measure.benchmark.rounds import MeasureOptions, Round, run_round  # noqa: E402
from runner.measure.benchmark.statistics import Estimate, noise_floor  # noqa: E402

CLAIMS_FILE = ROOT / "scripts" / "claims.yaml"
PAGE = ROOT / "docs" / "measured" / "claims.md"
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
NOT_MEASURABLE, BETTER = "not measurable here", "better than claimed"
PLAIN_ARM, CONTROL_ARM = "plain", "plain, again"
HIGHER_IS_BETTER = ("speed", "scaling")  # must reach the bar; all others must stay below it
TIMED_PASSES, WARMUP_PASSES = 9, 2  # forward passes
READINGS = 6  # the range of six readings covers the median with 97 %
METHOD = (
    "Intervals are 95 %; for memory and latency they are the range of six readings. A claim is "
    "decided if its interval, widened by the noise at both ends, lies on one side of the claimed "
    "minimum; otherwise it is undecided."
)


@dataclass(frozen=True)
class Claim:
    """One claim: `arm` of its trial compared with the plain run."""

    name: str
    claimed: str
    measures: str  # speed | memory | memory of a step | latency | scaling
    bar: float
    note: str  # why it should or should not hold
    arm: str = ""
    needs: str = ""  # a technique that has to be engaged
    range_end: float | None = None  # far end of a claimed range


@dataclass(frozen=True)
class ClaimRun:
    """A workload, the arms measured on it, and the claims they test."""

    about: str
    claims: list[Claim]
    work: list[str] = field(default_factory=list)
    arms: dict[str, list[str]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=lambda: ["optimization=none"])
    block_s: float | None = None  # for trials that need longer turns
    share: float = 1.0  # weight of its share of the budget
    gpus: int = 0  # number of GPUs it requires


@dataclass
class ClaimResult:
    """A claim's verdict and measured ratio to the plain run."""

    name: str
    claimed: str
    work: str
    quantity: str  # `Claim.measures`
    verdict: str = NOT_MEASURABLE
    ratio: float | None = None
    interval: tuple[float, float] | None = None  # 95 %
    noise: float | None = None  # noise floor: the plain run against itself
    reason: str = ""  # of the verdict
    note: str = ""  # why it should or should not hold
    command: str = ""  # trains the same config as the arm


def load_trials(path: Path = CLAIMS_FILE) -> list[ClaimRun]:
    """Load the trials of the YAML file."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["trials"]
    return [ClaimRun(**row | {"claims": [Claim(**c) for c in row["claims"]]}) for row in rows]


def measure_claims(
    trials: Sequence[ClaimRun], device: str, budget_s: float, options: MeasureOptions
) -> tuple[list[ClaimResult], Round]:
    """Test every claim within `budget_s` of measuring; also return the last trial's round.

    Trials share the budget by `ClaimRun.share`; starting and compiling are not counted.
    """
    results: list[ClaimResult] = []
    last_round = Round()
    for number, trial in enumerate(trials):
        options.announce(f"{trial.claims[0].name} ({number + 1} of {len(trials)})")
        share_s = budget_s * trial.share / (sum(t.share for t in trials[number:]) or 1.0)
        try:
            round_ = _run_trial(trial, device, share_s, options)
        except RunnerError as error:  # this machine or version does not support the config
            results += [_make_result(trial, claim, str(error)) for claim in trial.claims]
            continue
        if round_.measurements.stop_reason == INTERRUPTED:
            raise KeyboardInterrupt
        results += [judge_claim(trial, claim, round_) for claim in trial.claims]
        budget_s = max(budget_s - round_.measurements.seconds, 1e-3)
        last_round = round_ if round_.results else last_round
    return results, last_round


def _run_trial(trial: ClaimRun, device: str, budget_s: float, options: MeasureOptions) -> Round:
    """Measure the trial's arms and the plain run, which runs twice for the noise."""
    if trial.gpus:
        count = torch.cuda.device_count()
        raise RunnerError(f"needs {trial.gpus} GPUs in one run; torch sees {count} here")
    arms = [
        Arm(name, compose([f"device={device}", *trial.work, *overrides]), list(overrides))
        for name, overrides in {PLAIN_ARM: trial.plain, **trial.arms}.items()
    ]
    arms.append(replace(arms[0], name=CONTROL_ARM))
    settings = replace(options.settings, block_s=trial.block_s or options.settings.block_s)
    measures = {claim.measures for claim in trial.claims} & METRIC_FUNCTIONS.keys()
    metrics = {name: METRIC_FUNCTIONS[name] for name in sorted(measures)}
    options = replace(options, settings=settings, metrics=metrics)
    return run_round(arms, PLAIN_ARM, budget_s, 0, options)


def judge_claim(trial: ClaimRun, claim: Claim, round_: Round) -> ClaimResult:
    """Return the verdict on one claim from its trial's measurements."""
    problem = round_.describe_failure(PLAIN_ARM, claim.arm) or _explain_not_engaged(claim, round_)
    row = _make_result(trial, claim, problem)
    if row.reason:
        return row
    noise = 0.0
    if claim.measures == "speed" and {*round_.setups, *round_.failures} >= {CONTROL_ARM}:
        noise = noise_floor(round_.ratio([PLAIN_ARM], [CONTROL_ARM]))
        row.noise = noise if math.isfinite(noise) else None
    estimate = _estimate(claim, round_)
    if estimate is None:
        row.reason = "too few blocks, or memory was not measured"
        return row
    row.ratio, row.interval = estimate.ratio, estimate.interval
    row.reason = "no interval for the plain run against itself: the noise is unknown"
    if math.isfinite(noise):
        row.verdict, row.reason = decide_verdict(claim, estimate, noise)
    return row


def decide_verdict(claim: Claim, estimate: Estimate, noise: float) -> tuple[str, str]:
    """Return the verdict and its reason: which side of `bar` the whole interval is on.

    The interval is widened by `noise` at both ends. One beyond `range_end` is better than claimed.
    """
    low, high = estimate.low / (1 + noise), estimate.high * (1 + noise)
    bar, end = claim.bar, claim.range_end
    if claim.measures in HIGHER_IS_BETTER:
        reached, missed, exceeded = low >= bar, high < bar, end is not None and low > end
    else:
        reached, missed, exceeded = high <= bar, low > bar, end is not None and high < end
    if exceeded or reached or missed:
        return BETTER if exceeded else HOLDS if reached else FAILS, ""
    return UNDECIDED, f"{low:.2f} to {high:.2f} with noise: the interval contains {bar:g}"


def _estimate(claim: Claim, round_: Round) -> Estimate | None:
    """Return the ratio to the plain run; for memory and latency the ratio of medians, and range."""
    if claim.measures == "speed":
        return round_.ratio([PLAIN_ARM], [claim.arm])
    metrics = (round_.results[name].metrics for name in (claim.arm, PLAIN_ARM))
    arm, plain = (values.get(claim.measures, []) for values in metrics)
    if claim.measures == "latency":
        plain = [1.0]  # a reading is a ratio already
    if not arm or not plain or min(*arm, *plain) <= 0:
        return None
    return Estimate(median(arm) / median(plain), min(arm) / max(plain), max(arm) / min(plain))


def _explain_not_engaged(claim: Claim, round_: Round) -> str:
    """Return why the required technique is not engaged; "" if it is, or none is required."""
    if claim.arm not in round_.results:
        return "was not measured"
    row = round_.results[claim.arm].technique(claim.needs)
    if not claim.needs or row.get("engaged"):
        return ""
    return f"{claim.needs} did not engage: {row['reason'] or 'no reason given'}"


def _make_result(trial: ClaimRun, claim: Claim, reason: str) -> ClaimResult:
    words = [*trial.work, *trial.arms.get(claim.arm, ())]
    return ClaimResult(
        name=claim.name,
        claimed=claim.claimed,
        work=trial.about,
        quantity=claim.measures,
        reason=reason,
        note=claim.note,
        command=shlex.join(["python", "-m", "runner", *words]) if words else "",
    )


# -- metrics of a finished run ---------------------------------------------------------------------


def step_bytes(run: Run) -> float:
    """Return the bytes that one forward and backward adds at its peak.

    Device memory, or process memory on a CPU. Caches are released first.
    """
    memory.free_caches(run.device)
    with memory.peak_memory(run.device) as peak:
        dry_run_step(run)
        run.device.synchronize()
    if run.device.kind == "cpu":
        return float(peak.process - peak.process_before)
    return float(peak.on_device - peak.on_device_before)


def state_bytes(run: Run) -> float:
    """Return the bytes of weights, buffers and optimizer state."""
    tensors = [*run.model.parameters(), *run.model.buffers()]
    for state in run.update.optimizer.state.values():
        tensors += [value for value in state.values() if hasattr(value, "nbytes")]
    return float(sum(tensor.nbytes for tensor in tensors))


def compiled_latency_ratio(run: Run) -> float:
    """Return compiled over eager forward time, without gradients. ValueError if not compiled."""
    if run.compilation is None or not run.compilation.mode:
        raise ValueError("the model is not compiled")
    with ExitStack() as stack:
        stack.enter_context(modes.evaluation_mode(run.model))
        stack.enter_context(torch.no_grad())
        for context in run.contexts:
            stack.enter_context(context())
        names = {"call": call_model, "forward": run.forward, "inputs": run.validation.peek()[0]}
        timer = Timer("call(forward, inputs)", globals=names, num_threads=torch.get_num_threads())
        means = []
        for stance in ("default", "force_eager"):
            with torch.compiler.set_stance(stance):
                timer.timeit(WARMUP_PASSES)
                means.append(timer.timeit(TIMED_PASSES).mean)
    return means[0] / means[1]


def _read_step_memory(run: Run) -> list[float]:
    return [step_bytes(run) for _ in range(READINGS)]


def _read_memory(run: Run) -> list[float]:
    state = state_bytes(run)
    return [state + step for step in _read_step_memory(run)]


def _read_latency(run: Run) -> list[float]:
    return [compiled_latency_ratio(run) for _ in range(READINGS)]


METRIC_FUNCTIONS: dict[str, Callable[[Run], list[float]]] = {
    "memory": _read_memory,
    "memory of a step": _read_step_memory,
    "latency": _read_latency,
}
"""Functions that measure a finished run, by `Claim.measures`."""


# -- the page --------------------------------------------------------------------------------------


def _format_ratio(row: ClaimResult) -> str:
    """Return the measured value, formatted in the units of the claim."""
    if row.ratio is None or row.interval is None:
        return "–"
    low, high = row.interval
    if row.quantity == "speed":
        return f"{row.ratio:.2f}× ({low:.2f} to {high:.2f})"
    unit = "latency" if row.quantity == "latency" else "memory"
    ratio, least, most = (f"{(x - 1) * 100:+.0f}".replace("-", "−") for x in (row.ratio, low, high))
    return f"{ratio} % {unit} ({least} to {most})"


def format_claims(rows: Sequence[ClaimResult], facts: dict[str, object], minutes: float) -> str:
    """Return the Markdown page: a table, then reasons and commands."""
    noises = ["–" if row.noise is None else f"{row.noise * 100:.1f} %" for row in rows]
    cells = [
        (row.name, row.claimed, _format_ratio(row), noise, row.verdict)
        for row, noise in zip(rows, noises, strict=True)
    ]
    versions = provenance.versions()
    hardware = [str(facts.get("cpu") or "unknown CPU"), f"{facts.get('cores', '?')} cores"]
    if facts.get("device") not in (None, "cpu"):
        hardware.append(str(facts.get("device_name")))
    hardware += [f"{n} {versions[n]}" for n in ("torch", "python") if n in versions]
    items = [
        f"- **{escape(row.name)}** ({escape(row.work)}): "
        + escape(". ".join(filter(None, (row.reason, row.note))))
        for row in rows
    ]
    commands = dict.fromkeys(row.command for row in rows if row.command)
    commit = (provenance.read_git_state(ROOT) or {}).get("commit")
    facts_line = [", ".join(hardware), f"{datetime.now(UTC):%Y-%m-%d}", f"{minutes:.0f} minutes"]
    facts_line.append(f"commit {commit[:8]}" if commit else "commit unknown")
    parts = [
        "# Claims, checked on this machine",
        escape(f"{'; '.join(facts_line)}."),
        code("python scripts/bench_claims.py --write", "sh"),
        table(("claim", "claimed", "measured here", "noise", "verdict"), cells),
        METHOD,
        "\n".join(items),
        "Commands that train like each arm:",
        code("\n".join(commands), "sh"),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Parse, measure, print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="claims to test, by name; default: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of measuring, in all")
    parser.add_argument("--narrow", type=float, default=0.03, help="half-width of the intervals")
    parser.add_argument("--write", action="store_true", help=f"also write {PAGE.name}")
    typed = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    trials = load_trials()
    if typed.names:
        chosen = [[c for c in trial.claims if c.name in typed.names] for trial in trials]
        pairs = zip(trials, chosen, strict=True)
        trials = [replace(trial, claims=claims) for trial, claims in pairs if claims]
    options = MeasureOptions(BenchmarkConfig(narrow=typed.narrow))
    start_time = options.clock()
    with raise_on_signals():
        rows, last_round = measure_claims(trials, typed.device, typed.budget, options)
    facts = machine_facts([result.summary for result in last_round.results.values()])
    page = format_claims(rows, facts, (options.clock() - start_time) / 60)
    print(page)
    if typed.write:
        PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    # by name, so that the functions of a finished run can be imported in its process
    from bench_claims import main as run

    sys.exit(run())
