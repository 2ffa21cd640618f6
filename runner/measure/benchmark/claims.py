"""Test published claims about techniques (`conf/benchmark/claims/*.yaml`) on this machine.

A claim that this machine cannot test is reported with the reason; a failed trial affects its rows.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch.utils.benchmark import Timer

from runner.core.config.composing import compose
from runner.core.config.groups import CONF
from runner.core.config.run_config import RunConfig
from runner.core.device import memory
from runner.core.device.signals import raise_on_signals
from runner.core.errors import Interrupted, RunnerError, StorageError
from runner.core.interfaces.batch import call_model
from runner.core.interfaces.run import Run
from runner.core.models import modes
from runner.core.module_path import python_command
from runner.core.record import provenance
from runner.core.record.console import print_stdout
from runner.core.record.markdown import code, escape, table
from runner.core.record.storage import replace_text, write_json
from runner.core.techniques.probe import dry_run_step
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import INTERRUPTED, Turn
from runner.measure.benchmark.engine import median_load
from runner.measure.benchmark.machine import machine_facts
from runner.measure.benchmark.rounds import MeasureOptions, Round, ending_signal, run_round
from runner.measure.benchmark.statistics import Estimate, noise_floor

log = logging.getLogger("runner")

CLAIMS_FOLDER = CONF / "benchmark" / "claims"
JSON_FILE, MARKDOWN_FILE = "claims.json", "claims.md"
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
NOT_MEASURABLE, BETTER = "not measurable here", "better than claimed"
PLAIN_ARM, CONTROL_ARM = "plain", "plain, again"
HIGHER_IS_BETTER = ("speed", "scaling")  # must reach the bar; all others must stay below it
TIMED_PASSES, WARMUP_PASSES = 9, 2  # forward passes
READINGS = 6  # the range of six readings covers the median with 97 %
NOTABLE_LOAD = 0.1  # share of the CPUs used by other processes above which the page mentions it
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
class ClaimTrial:
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


@dataclass
class Claims:
    """All tested claims, with machine and versions: `claims.json`."""

    rows: list[ClaimResult] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)  # medians over all trials
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    schema: int = 1


def run_claims(config: RunConfig, folder: Path) -> None:
    """Run `benchmark.claims=true`: write claims.md and claims.json after each trial."""

    def save(claims: Claims) -> None:
        try:
            write_claims(claims, folder)
        except StorageError as error:  # a later write may succeed
            log.warning("%s", error)

    claims = measure_claims(config, save)
    for row in claims.rows:
        reason = f" ({row.reason})" if row.reason else ""
        print_stdout(f"{row.name}: {row.claimed}; here {_format_ratio(row)}: {row.verdict}{reason}")
    write_claims(claims, folder)
    print_stdout("", f"as Markdown: {folder / MARKDOWN_FILE}", soft_wrap=True)


def load_trials(folder: Path = CLAIMS_FOLDER) -> list[ClaimTrial]:
    """Load the trials of every YAML file in `folder`."""
    trials = []
    for path in sorted(folder.glob("*.yaml")):
        for row in yaml.safe_load(path.read_text(encoding="utf-8"))["trials"]:
            claims = [Claim(**claim) for claim in row["claims"]]
            trials.append(ClaimTrial(**{**row, "claims": claims}))
    return trials


def measure_claims(
    config: RunConfig,
    on_trial: Callable[[Claims], None] | None = None,
    trials: Sequence[ClaimTrial] | None = None,
    options: MeasureOptions | None = None,
) -> Claims:
    """Test every claim on the device of `config`, within `benchmark.budget_s` of measuring.

    Trials share the budget by `ClaimTrial.share`; starting and compiling are not counted.
    `on_trial` is called with the claims so far after every trial. Raises Interrupted on Ctrl-C and
    SIGTERM.
    """
    trials, options = trials or load_trials(), options or MeasureOptions(config.benchmark)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    claims = Claims(versions=provenance.versions(), command=provenance.command(), started=started)
    start_time, remaining_s = options.clock(), config.benchmark.budget_s
    turns: dict[str, list[Turn]] = {}
    with raise_on_signals():
        for number, trial in enumerate(trials):
            options.announce(f"{trial.claims[0].name} ({number + 1} of {len(trials)})")
            budget_s = remaining_s * trial.share / (sum(t.share for t in trials[number:]) or 1.0)
            try:
                round_ = _run_trial(trial, config, budget_s, options)
                if round_.measurements.stop_reason == INTERRUPTED:
                    raise KeyboardInterrupt
            except RunnerError as error:  # this machine or version does not support the config
                claims.rows += [_make_result(trial, claim, str(error)) for claim in trial.claims]
                continue
            except KeyboardInterrupt:
                progress = f" after {number} of {len(trials)} trials"
                raise Interrupted(ending_signal(), progress) from None
            claims.rows += [judge_claim(trial, claim, round_) for claim in trial.claims]
            remaining_s = max(remaining_s - round_.measurements.seconds, 1e-3)
            for name, arm_turns in round_.measurements.turns.items():
                turns[f"{number} {name}"] = arm_turns
            if round_.results:
                claims.machine = machine_facts([r.summary for r in round_.results.values()])
            claims.load, claims.seconds = asdict(median_load(turns)), options.clock() - start_time
            if on_trial is not None:
                on_trial(claims)
    return claims


def _run_trial(
    trial: ClaimTrial, config: RunConfig, budget_s: float, options: MeasureOptions
) -> Round:
    """Measure the trial's arms and the plain run, which runs twice if there is a control."""
    if trial.gpus:
        count = torch.cuda.device_count()
        raise RunnerError(f"needs {trial.gpus} GPUs in one run; torch sees {count} here")
    arms = []
    for name, overrides in {PLAIN_ARM: trial.plain, **trial.arms}.items():
        arm_config = compose([*trial.work, *overrides])
        arm_config.device, arm_config.seed = config.device, config.seed
        arms.append(Arm(name, arm_config, list(overrides)))
    if options.settings.control:
        arms.append(replace(arms[0], name=CONTROL_ARM))
    settings = replace(options.settings, block_s=trial.block_s or options.settings.block_s)
    measures = {claim.measures for claim in trial.claims} & METRIC_FUNCTIONS.keys()
    metrics = {name: METRIC_FUNCTIONS[name] for name in sorted(measures)}
    options = replace(options, settings=settings, metrics=metrics)
    return run_round(arms, PLAIN_ARM, budget_s, config.seed, options)


def judge_claim(trial: ClaimTrial, claim: Claim, round_: Round) -> ClaimResult:
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


def _make_result(trial: ClaimTrial, claim: Claim, reason: str) -> ClaimResult:
    words = [*trial.work, *trial.arms.get(claim.arm, ())]
    return ClaimResult(
        name=claim.name,
        claimed=claim.claimed,
        work=trial.about,
        quantity=claim.measures,
        reason=reason,
        note=claim.note,
        command=shlex.join([*python_command(), *words]) if words else "",
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


def format_claims(claims: Claims) -> str:
    """Return the Markdown page: a table, then reasons and commands."""
    rows, machine = claims.rows, claims.machine
    noises = ["–" if row.noise is None else f"{row.noise * 100:.1f} %" for row in rows]
    cells = [
        (row.name, row.claimed, _format_ratio(row), noise, row.verdict)
        for row, noise in zip(rows, noises, strict=True)
    ]
    hardware = [str(machine.get("cpu") or "unknown CPU"), f"{machine.get('cores', '?')} cores"]
    if machine.get("device") not in (None, "cpu"):
        hardware.append(str(machine.get("device_name")))
    hardware += [f"{n} {claims.versions[n]}" for n in ("torch", "python") if n in claims.versions]
    others = claims.load.get("others") or 0
    load = f"Other processes used {others:.0%} of the CPUs, which widens the intervals."
    items = [
        f"- **{escape(row.name)}** ({escape(row.work)}): "
        + escape(". ".join(filter(None, (row.reason, row.note))))
        for row in rows
    ]
    commands = dict.fromkeys(row.command for row in rows if row.command)
    parts = [
        "# Claims, checked on this machine",
        escape(f"{', '.join(hardware)}; {claims.started[:10]}; {claims.seconds / 60:.0f} minutes."),
        code(claims.command, "sh"),
        table(("claim", "claimed", "measured here", "noise", "verdict"), cells),
        METHOD,
        *([load] if others > NOTABLE_LOAD else []),
        "\n".join(items),
        "Commands that train like each arm:",
        code("\n".join(commands), "sh"),
    ]
    return "\n\n".join(parts) + "\n"


def write_claims(claims: Claims, folder: Path) -> None:
    """Write claims.json and claims.md atomically. Raises StorageError."""
    write_json(folder / JSON_FILE, asdict(claims))
    try:
        replace_text(folder / MARKDOWN_FILE, format_claims(claims))
    except OSError as error:
        raise StorageError(f"{folder / MARKDOWN_FILE}: not written: {error.strerror}") from error
