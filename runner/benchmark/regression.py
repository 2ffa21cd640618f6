"""A benchmark held against a stored one: what got slower, fatter or numerically different.

Arms are held against the reference of their own session, block by block, and these speed-ups are
compared: what the machine does to all arms of a session cancels. Times by themselves, such as the
reference's, are those of the machine too; they count where it was quiet both times. Where all arms
changed, that is stated of all of them. Memory and losses are compared as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import machine, machine_differences
from runner.benchmark.result import DONE, ArmResult, BenchmarkResult, Load
from runner.benchmark.statistics import CONFIDENCE, Estimate, unpaired
from runner.errors import ConfigError, StorageError
from runner.record.text import escape_control_chars

KEY = "benchmark.baseline"
NEEDED: dict[str, type] = {"cpu": str, "cores": int, "memory_gib": int, "platform": str}
"""What every result knows of its machine."""
LEAST_MS, MOST_MS = 1e-9, 1e12  # for a sample: a picosecond, and thirty years
MOST_FLOOR = 10.0  # beyond this a control says nothing
PARITY = ("exact", "explained by precision", "FAIL")  # from good to bad
LEAST_BYTES = 16 << 20  # what two runs of the same differ by in memory, and more
QUIET = (
    0.05  # share of the CPUs that others, or the hypervisor, may take: times by themselves count
)
CLOCK = 0.05  # that the clocks of two sessions may differ by, where they do
ROUNDINGS = {"amp": 2**-8, "tf32": 2**-11}  # of bf16, the coarser of the 16-bit types, and TF32
FULL = 2**-24  # of fp32
GROWTH = {True: 2.0, False: 64.0}  # roundings a step that a loss may be off by: 16 bits, fp32


@dataclass
class Against:
    """What came of holding one benchmark against another."""

    path: str
    started: str  # when the stored one was measured
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)  # each ratio and its interval

    def plain(self) -> dict[str, Any]:
        """As `BenchmarkResult.baseline` keeps it."""
        said = self.regressions or ["nothing got worse"]
        return {
            "path": self.path,
            "started": escape_control_chars(self.started),
            "regressed": bool(self.regressions),
            "sentences": [*said, *self.notes],
            "regressions": self.regressions,
            "compared": self.compared,
        }


def stored(settings: BenchmarkConfig, names: Sequence[str]) -> BenchmarkResult | None:
    """The result that `benchmark.baseline` names, if it names one.

    Raises ConfigError where there is none, it is damaged, of another machine, or has none of the
    arms `names`; before anything is measured, as far as the machine is known by then.
    """
    if settings.baseline is None:
        return None
    found = read_baseline(settings.baseline)
    _same_machine(found, machine())
    theirs = [arm.name for arm in found.arms]
    if not set(theirs) & set(names):
        raise ConfigError(
            KEY,
            "none of its arms is measured now: it has "
            + ", ".join(map(escape_control_chars, theirs)),
            "measure one of them",
        )  # fmt: skip
    return found


def _same_machine(then: BenchmarkResult, now: dict[str, Any]) -> None:
    differing = machine_differences(now, then.machine)
    if differing:
        raise ConfigError(
            KEY, f"is of another machine: {escape_control_chars('; '.join(differing))}",
            "measure the stored one anew, on this machine",
        )  # fmt: skip


def against(now: BenchmarkResult, then: BenchmarkResult, settings: BenchmarkConfig) -> Against:
    """Every arm that both have, held against itself. Raises ConfigError for another machine."""
    _same_machine(then, now.machine)
    found = Against(str(settings.baseline), then.started)
    before = {arm.name: arm for arm in then.arms}
    pairs = []
    for arm in now.arms:
        old = before.pop(arm.name, None)
        if old is None:
            found.notes.append(f"{escape_control_chars(arm.name)} is not in the stored result")
        elif differing := _differing_work(arm, old):
            found.notes.append(
                f"{escape_control_chars(arm.name)} is not compared: "
                f"{escape_control_chars(differing)}"
            )
        else:
            pairs.append((arm, old))
    found.notes += [f"{escape_control_chars(name)} was not measured now" for name in before]
    torch, was = now.machine.get("torch"), then.machine.get("torch")
    if torch != was:
        found.notes.append(escape_control_chars(f"torch is {torch} and was {was}"))
    for arm, old in pairs:
        found.regressions += _ended(arm, old)
    found.regressions += _slower(now, then, pairs, settings.tolerance, found)
    for arm, old in pairs:
        found.regressions += _fatter(arm, old, settings.tolerance)
        found.regressions += _other_numbers(arm, old, found)
    return found


def _differing_work(now: ArmResult, then: ArmResult) -> str:
    """Why the two did not do the same; keys that only one version of the runner has are left."""
    if now.overrides != then.overrides:
        return f"it stands for {' '.join(now.overrides)} and stood for {' '.join(then.overrides)}"
    for key in now.config.keys() & then.config.keys():
        if now.config[key] != then.config[key]:
            return f"{key} is {now.config[key]} and was {then.config[key]}"
    return ""


def _ended(now: ArmResult, then: ArmResult) -> Iterator[str]:
    if now.status != DONE and then.status == DONE:
        reason = escape_control_chars(now.reason)
        name = escape_control_chars(now.name)
        yield f"{name} did not come to its end ({now.status}: {reason})"


def _slower(
    now: BenchmarkResult,
    then: BenchmarkResult,
    pairs: Sequence[tuple[ArmResult, ArmResult]],
    tolerance: float,
    found: Against,
) -> Iterator[str]:
    """The reference by its time, the others by theirs next to it.

    Where a session lacks the reference, the arm whose time changed by the median takes its place. A
    speed-up is a ratio of two processes and has the noise floor of its session, so the ratio of two
    speed-ups has that of both.
    """
    if now.compared != then.compared:  # an arm with data workers came or went
        found.notes.append(
            "times are not compared: they are of the "
            f"{escape_control_chars(now.compared)} and were of the "
            f"{escape_control_chars(then.compared)} of each turn"
        )
        return
    if now.noise_floor is None or then.noise_floor is None:
        found.notes.append("times are not compared: a noise floor of the two is not known")
        return
    timed = [(a, b) for a, b in pairs if a.per_sample_ms and b.per_sample_ms]
    if not timed:
        return
    limit = max(math.hypot(now.noise_floor, then.noise_floor), tolerance)
    alpha = (1 - CONFIDENCE) / len(timed)
    changes = {a.name: unpaired(b.per_sample_ms, a.per_sample_ms, alpha) for a, b in timed}
    ordered = sorted(timed, key=lambda pair: changes[pair[0].name].ratio)
    middle = ordered[len(ordered) // 2]
    beside = next((pair for pair in timed if pair[0].name == now.reference), middle)
    name, unquiet = beside[0].name, _unquiet(now.load, then.load)
    common = _times_as_long(changes[name]) if _is_common(changes.values(), limit) else ""
    yield from _by_itself(beside, changes[name], limit, alpha, found, unquiet, common, len(timed))
    for arm, old in timed:
        if arm is not beside[0]:
            times = [_next_to(one, plain) for one, plain in zip((arm, old), beside, strict=True)]
            held = f", held against {escape_control_chars(name)}"
            held += f", beyond the {common} of all arms" if common else ""
            said = list(_longer(arm.name, times, limit, alpha, found, name, held))
            if unquiet or changes[arm.name].ratio < 1 / (1 + limit):
                yield from said
            else:  # it is the reference that takes less time
                found.notes += [f"{one}; by itself it is within that" for one in said]


def _by_itself(
    pair: tuple[ArmResult, ArmResult],
    change: Estimate,
    limit: float,
    alpha: float,
    found: Against,
    unquiet: str,
    common: str,
    arms: int,
) -> Iterator[str]:
    """What the time of the reference says: of all arms where they changed alike, else of itself."""
    name = escape_control_chars(pair[0].name)
    if common:
        more = "longer" if change.ratio < 1 else "less time"
        text = (
            f"all arms took {more} per sample: {common}, by {name}; the machine changed or code "
            "that they share, and a new baseline of the old code tells which"
        )
        if more == "longer" and not unquiet:
            yield text
        else:
            found.notes.append(f"{text}; not judged: {unquiet}" if unquiet else text)
    elif not unquiet:
        held = ", which one arm alone cannot tell from a slower machine" if arms == 1 else ""
        times = [one.per_sample_ms for one in pair]
        yield from _longer(pair[0].name, times, limit, alpha, found, "", held)
    else:
        found.notes.append(
            f"{name} took {1 / change.ratio:.2f} times as long per sample by itself, which is not "
            f"judged: {unquiet}"
        )


def _is_common(changes: Iterable[Estimate], limit: float) -> bool:
    """Whether several arms all got slower, or all faster, by more than the limit."""
    changes = list(changes)
    slower = [change.high < 1 and change.ratio < 1 / (1 + limit) for change in changes]
    faster = [change.low > 1 and change.ratio > 1 + limit for change in changes]
    return len(changes) > 1 and (all(slower) or all(faster))


def _times_as_long(change: Estimate) -> str:
    low, middle, high = (1 / ratio for ratio in (change.high, change.ratio, change.low))
    return f"{middle:.2f} times as long ({low:.2f} to {high:.2f})"


def _next_to(arm: ArmResult, plain: ArmResult) -> list[float]:
    """An arm's times by those of the reference in the same blocks."""
    return [a / b for a, b in zip(arm.per_sample_ms, plain.per_sample_ms, strict=False)]


def _unquiet(now: Load, then: Load) -> str:
    """Why times of the two sessions are not those of the code alone; "" where they may be."""
    for key, who in (("others", "other processes"), ("stolen", "the hypervisor")):
        shares = getattr(now, key), getattr(then, key)
        if None in shares and key == "others":
            return "how busy the machine was is not known of both"
        if any(share is not None and share > QUIET for share in shares):
            took = " and ".join("?" if share is None else f"{share:.0%}" for share in shares)
            return f"{who} took {took} of the CPUs, now and then"
    if now.mhz and then.mhz and abs(now.mhz / then.mhz - 1) > CLOCK:
        return f"the CPU ran at {now.mhz:,.0f} MHz and at {then.mhz:,.0f} MHz then"
    return ""


def _longer(
    name: str,
    times: Sequence[Sequence[float]],
    limit: float,
    alpha: float,
    found: Against,
    beside: str,
    held: str,
) -> Iterator[str]:
    """Whether the first of the two `times`, those of now, are longer by more than the limit.

    `held` says against what they are held.
    """
    now, then = times
    estimate = unpaired(then, now, alpha)
    known = math.isfinite(estimate.half_width)
    found.compared.append(
        {
            "name": name,
            "beside": beside,
            "ratio": estimate.ratio,
            "interval": [estimate.low, estimate.high] if known else None,
            "limit": limit,
        }
    )
    name = escape_control_chars(name)
    if not known:
        found.notes.append(f"{name}: too few blocks to compare its times")
    elif estimate.high < 1 and estimate.ratio < 1 / (1 + limit):
        slower, least, most = (1 / r - 1 for r in (estimate.ratio, estimate.high, estimate.low))
        yield (
            f"{name} takes {slower:.1%} more time per sample{held} ({least:.1%} to {most:.1%}; "
            f"up to {limit:.1%} is no regression)"
        )
    elif estimate.low > 1 and estimate.ratio > 1 + limit:
        found.notes.append(f"{name} takes {1 - 1 / estimate.ratio:.1%} less time{held}")


def _fatter(now: ArmResult, then: ArmResult, tolerance: float) -> Iterator[str]:
    for key, whose in (("peak_process_bytes", "process"), ("peak_device_bytes", "device")):
        more, less = getattr(now, key), getattr(then, key)
        if more is None or not less or more - less <= LEAST_BYTES:
            continue
        if more > less * (1 + tolerance):
            yield (
                f"{escape_control_chars(now.name)} holds "
                f"{(more - less) / 2**20:,.0f} MiB more memory of the "
                f"{whose} at its peak ({more / less - 1:.0%})"
            )


def _other_numbers(now: ArmResult, then: ArmResult, found: Against) -> Iterator[str]:
    name = escape_control_chars(now.name)
    ours, theirs = now.parity, then.parity
    if ours in PARITY and theirs in PARITY and PARITY.index(ours) > PARITY.index(theirs):
        reason = escape_control_chars(now.parity_reason)
        yield f"{name}: parity is {ours} and was {theirs} ({reason})"
    taken, took = _engaged(now), _engaged(then)
    if taken != took:
        gone, new = sorted(took - taken), sorted(taken - took)
        words = [*(f"not {n}" for n in gone), *new]
        found.notes.append(
            f"{name}: took hold now: {', '.join(words)}; its losses are not compared"
        )
        return
    rounding = max((ROUNDINGS.get(technique, FULL) for technique in taken), default=FULL)
    for step, (a, b) in enumerate(zip(now.losses, then.losses, strict=False), 1):
        bound = GROWTH[rounding != FULL] * rounding * step
        if math.isnan(b):  # it was not finite then
            continue
        if not abs(a - b) <= bound * max(abs(b), 1e-6):
            yield (
                f"{name}: the loss at step {step} is {a:.6g} and was {b:.6g}; rounding explains "
                f"{bound:.1e} of it"
            )
            return


def _engaged(arm: ArmResult) -> set[str]:
    rows = arm.summary.get("techniques") or []
    return {str(row.get("name")) for row in rows if isinstance(row, dict) and row.get("engaged")}


# -- a stored result may be damaged, and an impossible number would decide every comparison --------


def read_baseline(path: str) -> BenchmarkResult:
    """The stored result in a file or folder. ConfigError where there is none, or it is damaged."""
    try:
        found = BenchmarkResult.read(Path(path))
    except StorageError as error:
        raise ConfigError(
            KEY, escape_control_chars(str(error)), "name a benchmark.json or its folder"
        ) from error
    wrong = next(_find_damage(found), None)
    if wrong is not None:
        raise ConfigError(
            KEY, f"{escape_control_chars(path)} is damaged: {escape_control_chars(wrong)}",
            "measure it anew, or name another",
        )  # fmt: skip
    return found


def _find_damage(found: BenchmarkResult) -> Iterator[str]:
    """Everything in it that no benchmark leaves."""
    for key, kind in NEEDED.items():
        value = found.machine.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            yield f"machine.{key} is {value!r:.40}"
    for key, value in found.machine.items():
        if not isinstance(value, str | int | float | None):
            yield f"machine.{key} is {value!r:.40}"
    if found.noise_floor is not None and not 0 <= found.noise_floor <= MOST_FLOOR:
        yield f"noise_floor is {found.noise_floor}"
    for key in ("others", "stolen"):
        share = getattr(found.load, key)
        if share is not None and not 0 <= share <= 1:
            yield f"load.{key} is {share}"
    names = [arm.name for arm in found.arms]
    if not names:
        yield "there is no arm"
    if len(set(names)) < len(names):
        yield "an arm comes twice"
    for number, arm in enumerate(found.arms):
        yield from (f"arms[{number}].{what}" for what in _find_arm_damage(arm))


def _find_arm_damage(arm: ArmResult) -> Iterator[str]:
    for n, ms in enumerate(arm.per_sample_ms):
        if not LEAST_MS <= ms <= MOST_MS:
            yield f"per_sample_ms[{n}] is {ms}"
    for n, loss in enumerate(arm.losses):
        if math.isinf(loss):  # NaN is how one that was not finite is kept
            yield f"losses[{n}] is {loss}"
    for key in ("peak_process_bytes", "peak_device_bytes"):
        peak = getattr(arm, key)
        if peak is not None and not 0 <= peak < 2**60:
            yield f"{key} is {peak}"
    if arm.parity not in (None, *PARITY):
        yield f"parity is {arm.parity!r:.40}"
    if not _are_techniques(arm.summary.get("techniques")):
        yield "summary.techniques is no list of techniques"


def _are_techniques(rows: Any) -> bool:
    if rows is None:
        return True
    return (
        isinstance(rows, Sequence)
        and not isinstance(rows, str)
        and all(isinstance(row, Mapping) and isinstance(row.get("name"), str) for row in rows)
    )
