"""What people say about techniques, each of it measured here: claimed against seen.

A statement that cannot be tried on this machine, or not well enough, says so and why; one trial
that fails is a row or two, and the others go on.
"""

from __future__ import annotations

import math
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import Turn
from runner.benchmark.claims.gauges import GAUGES, INT8, LATENCY
from runner.benchmark.claims.statements import (
    BETTER,
    FAILS,
    HOLDS,
    PLAIN,
    TRIALS,
    UNDECIDED,
    UNKNOWN,
    ClaimResult,
    Claims,
    Quantity,
    Statement,
    Trial,
)
from runner.benchmark.crew.crew import Finished
from runner.benchmark.engine import interruptible
from runner.benchmark.heat import INTERRUPTED, Heat, Told, With, run_heat
from runner.benchmark.machine import machine
from runner.benchmark.rows import load_of
from runner.benchmark.statistics import Estimate, noise_floor
from runner.composing import compose
from runner.config import RunConfig
from runner.errors import Interrupted, RunnerError
from runner.record import provenance

AGAIN = "plain, again"
IMAGES = 256  # of each of two classes
SIDE = 256  # pixels
SAVES = (Quantity.step_memory, Quantity.memory)
GAINS = (Quantity.speed, Quantity.inference)


def measure_claims(
    config: RunConfig,
    told: Told | None = None,
    each: Callable[[Claims], None] | None = None,
    trials: Sequence[Trial] = TRIALS,
    how: With | None = None,
) -> Claims:
    """Try every statement on the device of `config`, within `benchmark.budget_s` of measuring.

    The budget is shared over the trials by `Trial.share`; starting and compiling come on top.
    `each` is handed what there is after each trial. Raises Interrupted after Ctrl-C and SIGTERM.
    """
    how = how or With(config.benchmark)
    found = Claims(
        versions=provenance.versions(),
        command=provenance.command(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    done = 0
    with (
        tempfile.TemporaryDirectory(prefix="runner-claims-") as folder,
        interruptible() as received,
    ):
        try:
            for _ in _all(found, config, trials, Path(folder), how, told):
                done += 1
                if each is not None:
                    each(found)
        except KeyboardInterrupt:
            ended = received[0] if received else signal.SIGINT
            raise Interrupted(ended, f" after {done} of {len(trials)} trials") from None
    return found


def _all(
    found: Claims,
    config: RunConfig,
    trials: Sequence[Trial],
    folder: Path,
    how: With,
    told: Told | None,
) -> Iterator[None]:
    """Fill in what each trial shows, trial by trial."""
    began, left, turns = how.clock(), config.benchmark.budget_s, dict[str, list[Turn]]()
    for number, trial in enumerate(trials):
        if told is not None:
            names = ", ".join(statement.name for statement in trial.statements)
            told(f"{names} ({number + 1} of {len(trials)})")
        if trial.gpus:
            reason = _no_gpus(trial.gpus)
            found.rows += [_row(trial, statement, reason) for statement in trial.statements]
            yield
            continue
        budget = left * trial.share / sum(later.share for later in trials[number:])
        try:
            heat = _tried(trial, config, budget, folder, how, number, told)
        except RunnerError as error:  # a config that this machine or version refuses
            found.rows += [_row(trial, statement, str(error)) for statement in trial.statements]
            yield
            continue
        if heat.measured.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        found.rows += [judge(trial, statement, heat) for statement in trial.statements]
        left = max(left - heat.measured.seconds, 1e-3)
        turns |= {f"{number} {name}": some for name, some in heat.measured.turns.items()}
        for finished in heat.finished.values():
            found.machine = machine([finished.summary])
        found.load, found.seconds = asdict(load_of(turns)), how.clock() - began
        yield


def _tried(
    trial: Trial,
    config: RunConfig,
    budget_s: float,
    folder: Path,
    how: With,
    seed: int,
    told: Told | None,
) -> Heat:
    """The trial's arms side by side, the plain one twice."""
    work = [*trial.work, *_images(folder)] if trial.images else list(trial.work)
    plain = _arm(PLAIN, work, trial.plain, config)
    arms = [plain, *(_arm(name, work, own, config) for name, own in trial.arms.items())]
    if how.settings.control:
        arms.append(replace(plain, name=AGAIN))
    settings = replace(how.settings, block_s=trial.block_s or how.settings.block_s)
    quantities = {statement.quantity for statement in trial.statements}
    metrics = {
        **(GAUGES if quantities & set(SAVES) else {}),
        **(INT8 if Quantity.inference in quantities else {}),
        **(LATENCY if Quantity.latency in quantities else {}),
    }
    how = replace(how, settings=settings, metrics=metrics)
    return run_heat(arms, PLAIN, budget_s, seed, how, told)


def _arm(name: str, work: Sequence[str], own: Sequence[str], base: RunConfig) -> Arm:
    config = compose([*work, *own])
    config.device, config.seed = base.device, base.seed
    return Arm(name, config, list(own))


def _images(folder: Path) -> list[str]:
    """Image files to read, made once: noise that is smooth, as pictures are."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for label in ("dark", "light"):
        place = folder / label
        place.mkdir(exist_ok=True)
        for number in range(IMAGES):
            coarse = draw.integers(0, 128, (16, 16, 3)) + (128 if label == "light" else 0)
            picture = Image.fromarray(coarse.astype(np.uint8)).resize((SIDE, SIDE))
            picture.save(place / f"{number}.jpg", quality=90)
    return [f"data.path={folder}"]


def judge(trial: Trial, statement: Statement, heat: Heat) -> ClaimResult:
    """What the trial says of one of its statements."""
    reason = heat.why_not(PLAIN, statement.arm) or _missing(statement, heat)
    row = _row(trial, statement, reason)
    if reason:
        return row
    noise = 0.0
    if statement.quantity in (Quantity.speed, Quantity.cost) and AGAIN in heat.names():
        noise = noise_floor(heat.ratio([PLAIN], [AGAIN]))
        row.noise = noise if math.isfinite(noise) else None
    seen = _seen(statement, heat)
    if seen is None:
        row.reason = "there is too little to tell: too few blocks, or no reading of the memory"
        return row
    row.ratio, row.interval = seen.ratio, (seen.low, seen.high)
    if math.isinf(noise):
        row.reason = "the plain run against itself has no interval: what is noise is not known"
        return row
    row.verdict, row.reason = verdict(statement, seen, noise)
    return row


def verdict(statement: Statement, seen: Estimate, noise: float) -> tuple[str, str]:
    """Whether all of the interval, the noise added at both ends, is on one side of the bar.

    Where a range is said and all of it lies past the far end, it is better than said.
    """
    low, high = seen.low / (1 + noise), seen.high * (1 + noise)
    bar, most = statement.bar, statement.most
    if statement.quantity in GAINS:
        reached, missed = low >= bar, high < bar
        past = most is not None and low > most
    else:
        reached, missed = high <= bar, low > bar
        past = most is not None and high < most
    if past:
        return BETTER, ""
    if reached or missed:
        return (HOLDS if reached else FAILS), ""
    return UNDECIDED, f"{low:.2f} to {high:.2f} with the noise: on both sides of {bar:g}"


def _no_gpus(needed: int) -> str:
    """Why a claim about several GPUs is not tried."""
    import torch

    there = torch.cuda.device_count()
    if there < needed:
        return f"it takes {needed} GPUs or more, and torch sees {there} here"
    return f"torch sees {there} GPUs, and a run uses one: training on several is not built yet"


def _seen(statement: Statement, heat: Heat) -> Estimate | None:
    ours, plain = heat.finished[statement.arm], heat.finished[PLAIN]
    if statement.quantity is Quantity.speed:
        return heat.ratio([PLAIN], [statement.arm])
    if statement.quantity is Quantity.cost:
        return _cost(statement, heat, ours)
    if statement.quantity is Quantity.inference:
        return _spread(_readings(ours, "int8_speedup"), [1.0])
    if statement.quantity is Quantity.latency:
        return _spread(_readings(ours, "compiled_latency"), [1.0])
    whole = statement.quantity is Quantity.memory
    return _spread(*(_held(finished, whole) for finished in (ours, plain)))


def _cost(statement: Statement, heat: Heat, ours: Finished) -> Estimate | None:
    """How much longer a step is, and what the tool has on its own account, shared over steps."""
    seen = heat.ratio([statement.arm], [PLAIN])
    if seen is None or not statement.tool:
        return seen
    step = median(turn.seconds / turn.steps for turn in heat.measured.turns[PLAIN])
    spent = [t for t in ours.summary.get("tools") or [] if t["name"] == statement.tool]
    steps = statement.run_steps or ours.summary["steps"]
    more = sum(tool["seconds"] for tool in spent) / (steps * step)
    return Estimate(seen.ratio + more, seen.low + more, seen.high + more)


def _held(finished: Finished, whole: bool) -> list[float]:
    steps = _readings(finished, "step_bytes")
    state = finished.metrics.get("state_bytes", 0.0) if whole else 0.0
    return [state + step for step in steps]


def _readings(finished: Finished, name: str) -> list[float]:
    return [value for key, value in finished.metrics.items() if key.partition(" ")[0] == name]


def _spread(ours: Sequence[float], plain: Sequence[float]) -> Estimate | None:
    """The ratio of the medians, and how far apart the readings let it be."""
    if not ours or not plain or min(plain) <= 0 or min(ours) <= 0:
        return None
    return Estimate(median(ours) / median(plain), min(ours) / max(plain), max(ours) / min(plain))


def _missing(statement: Statement, heat: Heat) -> str:
    """Why the technique did not take hold; "" where it did, or none is needed."""
    if not statement.needs or statement.arm not in heat.finished:
        return "" if statement.arm in heat.finished else "was not measured"
    for row in heat.finished[statement.arm].summary.get("techniques") or []:
        if row["name"] == statement.needs and not row["engaged"]:
            return f"{statement.needs} did not take hold: {row['reason'] or 'no reason given'}"
    return ""


def _row(trial: Trial, statement: Statement, reason: str) -> ClaimResult:
    shown = ["data.path=FOLDER"] if trial.images else []
    words = [*trial.work, *shown, *trial.arms.get(statement.arm, ())]
    return ClaimResult(
        statement.name, statement.said, trial.about, statement.quantity.value, UNKNOWN,
        reason=reason, why=statement.why,
        command=shlex.join(["python", "-m", "runner", *words]) if words else "",
    )  # fmt: skip
