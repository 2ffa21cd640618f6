"""`optimization=auto`: from a config that leaves it open to the techniques of a run.

They are measured on the run's own model, data and device, unless an earlier run of the same kind
did that (`$XDG_CACHE_HOME/runner/auto`), or the run is too short for a search.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from omegaconf import OmegaConf

from runner.benchmark.arms import Arm, knob_text
from runner.benchmark.auto.candidates import (
    ALWAYS,
    NONE,
    Candidate,
    SearchResult,
    enable_techniques,
    make_candidates,
    pinned_techniques,
    sort_techniques,
)
from runner.benchmark.auto.estimate import RunEstimate, arm_config, estimate_run, time_step
from runner.benchmark.auto.search import AGAIN, Search
from runner.benchmark.auto.select import select
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.parity_checker import ParityChecker
from runner.benchmark.result import from_json
from runner.benchmark.workers.pool import WorkerPool
from runner.build import Components
from runner.checkpoint.checkpointer import Checkpointer
from runner.config import RunConfig
from runner.errors import RunnerError
from runner.record.storage import replace_text
from runner.record.text import escape_control_chars, json_safe
from runner.techniques.base import Choice
from runner.techniques.config import Optimization
from runner.training.signals import Interrupts

log = logging.getLogger("runner")

KEY = "optimization"
YAML = "optimization.yaml"
EVIDENCE = "optimization_evidence.json"
SCHEMA = 3
BLOCK_S = 0.2
WARM_UP = 5  # steps
LEAST_S = 120.0  # that a candidate may take to build and compile, however small the budget
BUDGETS = 2  # a run must take so many for a search to be worth it
TIMINGS, TIMING_S = 5, 4.0  # of a too short run with what is free and without, in turn
BY_RULE = "it differs from none by rounding only; the numbers of this run were not judged"


def resolve_auto(
    config: RunConfig,
    folder: Path | None = None,
    given: Components | None = None,
    search: bool = True,
) -> Components:
    """The parts to build the run with: `given`, and what `optimization=auto` selected.

    Any other level is left as it is. A resumed run keeps what it had selected. Without `search`
    nothing is measured. With a `folder` the selection is written there as a config file, with the
    evidence beside it. Raises Interrupted; any other failure costs only the selection.
    """
    given = given or Components()
    if config.optimization.level != "auto":
        return given
    recorded = _read_checkpoint(config, folder)
    if recorded is not None:
        names = sort_techniques(recorded.split())
        return _choose(given, config, names, "as before the run was resumed")
    if not search:
        return _choose(given, config, [], "nothing is measured for this job")
    result = _measure(config, given)
    if folder is not None:
        optimization = enable_techniques(config.optimization, result.techniques)
        _write(folder / YAML, as_yaml(optimization, result.reason))
        _write(folder / EVIDENCE, _as_json(result))
    _log(f"{result.chosen}: {result.reason}")
    return _choose(given, config, result.techniques, result.reason)


def resolve_config(
    config: RunConfig, folder: Path | None = None, given: Components | None = None
) -> RunConfig:
    """The same config with the selection of `optimization=auto` in its place."""
    optimization = resolve_auto(config, folder, given).optimization
    return config if optimization is None else replace(config, optimization=optimization)


def resolve_arms(
    arms: Sequence[Arm], folder: Path | None = None, given: Components | None = None
) -> list[Arm]:
    """The same for arms of a benchmark that will be recorded in `folder`."""
    return [
        replace(arm, config=resolve_config(arm.config, folder and folder / arm.folder, given))
        for arm in arms
    ]


def make_arms(config: RunConfig, candidates: Sequence[Candidate]) -> list[Arm]:
    """`none`, its control, and every candidate."""
    arms = [Arm(name, arm_config(config, ())) for name in (NONE, AGAIN)]
    return arms + [Arm(one.name, arm_config(config, one.techniques)) for one in candidates]


def _choose(given: Components, config: RunConfig, names: list[str], reason: str) -> Components:
    value = " ".join(sort_techniques([*names, *pinned_techniques(config.optimization)])) or NONE
    return replace(
        given,
        optimization=enable_techniques(config.optimization, names),
        chosen=[Choice(KEY, value, escape_control_chars(reason))],
    )


def _read_checkpoint(config: RunConfig, folder: Path | None) -> str | None:
    """The selection of the run that is resumed."""
    resume = config.checkpoint.resume
    where = folder if resume == "auto" else None if resume == "none" else Path(resume)
    value = None if where is None else Checkpointer(None, 1).recorded(where).get(KEY)
    return None if value is None else str(value)


def _measure(config: RunConfig, given: Components) -> SearchResult:
    """A result from the cache, by rule or by a search; whatever fails, there is one."""
    auto = config.optimization.auto
    with Interrupts() as interrupts:
        interrupts.waiting = True  # the processes are ended by the `with` that started them
        try:
            estimate = estimate_run(config, given)
            result = read_cache(estimate.key) if auto.cache else None
            if result is not None:
                result.reason += "; measured before, for an earlier run"
                return result
            if estimate.seconds < BUDGETS * auto.budget_s:
                why = (
                    f"the run takes about {estimate.seconds:.2g} s at none: a search of "
                    f"optimization.auto.budget_s={auto.budget_s:g} is for runs of "
                    f"{BUDGETS * auto.budget_s:g} s"
                )
                return _select_by_rule(config, given, estimate, why)
            result = _search(config, given, estimate)
            judged = all(row.parity is not None or not row.parity_reason for row in result.tried)
            if auto.cache and judged:
                _write(_cache_file(estimate.key), _as_json(result))
            return result
        except KeyboardInterrupt:
            raise interrupts.error(" while optimization=auto was measuring") from None
        except ArmEnded as error:
            return SearchResult(reason=f"nothing could be measured: none {error.status}: {error}")
        except RunnerError:
            raise  # it would end the run as well
        except Exception as error:  # the run itself will report it, if it meets it
            log.error("optimization=auto failed", exc_info=error, extra={"live": True})
            reason = f"nothing could be measured: {type(error).__name__}: {error}"
            return SearchResult(reason=reason)


def _search(config: RunConfig, given: Components, estimate: RunEstimate) -> SearchResult:
    auto = config.optimization.auto
    limit = None if auto.memory_budget_mb is None else auto.memory_budget_mb * 2**20
    pinned = pinned_techniques(config.optimization)
    candidates = make_candidates(estimate.reasons, pinned, limit is not None)
    arms = {arm.name: arm for arm in make_arms(config, candidates)}
    settings = BenchmarkConfig(
        warmup_steps=WARM_UP, block_s=BLOCK_S, timeout_s=max(LEAST_S, auto.budget_s)
    )
    _log(f"{len(candidates)} candidates, for optimization.auto.budget_s={auto.budget_s:g}")
    with (
        WorkerPool(list(arms.values()), settings, None, given) as workers,
        ParityChecker(settings.timeout_s, given) as checker,
    ):
        search = Search(
            candidates,
            workers,
            estimate.steps,
            auto.budget_s,
            BLOCK_S,
            time.monotonic,
            _log,
            config.seed,
        )
        result = select(
            search, lambda name, within_s: checker.check(arms[name], None, within_s), limit
        )
    result.left_out, result.facts = estimate.reasons, estimate.facts
    untried = sum(row.state == "not tried" for row in result.tried)
    _log(f"searched for {result.seconds:.0f} s; {untried} of {len(result.tried)} not tried")
    if limit is None and untried == len(result.tried):
        why = f"optimization.auto.budget_s={auto.budget_s:g} is too small for a search here"
        return _select_by_rule(config, given, estimate, why)
    return result


def _select_by_rule(
    config: RunConfig, given: Components, estimate: RunEstimate, why: str
) -> SearchResult:
    """Without a search: the free techniques, where a step with them takes no longer here."""
    auto, pinned = config.optimization.auto, pinned_techniques(config.optimization)
    free = sort_techniques(n for n in ALWAYS if n not in estimate.reasons and n not in pinned)
    result = SearchResult(
        steps=estimate.steps,
        none_ms=1e3 * estimate.step_seconds,
        budget_s=auto.budget_s,
        left_out=estimate.reasons,
        facts=estimate.facts,
        reason=f"{why}, and no free technique is left",
    )
    if not free:
        return result
    ratio = _time_in_turn(config, given, free)
    row = Candidate(" ".join(free), free, parity_reason=BY_RULE, round_ratio=1 / ratio)
    result.tried.append(row)
    times = f"with what is free ({row.name}) a step takes {ratio:.2f} times as long"
    if ratio > 1:
        row.state, row.why = "out", times
        result.reason = f"{why}, and {times}"
        return result
    row.state, result.chosen, result.techniques = "chosen", row.name, free
    result.reason = f"{why}; {times}, and {BY_RULE}"
    return result


def _time_in_turn(config: RunConfig, given: Components, names: Sequence[str]) -> float:
    """The median ratio of step times with these techniques and without; in this process."""
    began, ratios = time.monotonic(), list[float]()
    while len(ratios) < TIMINGS and (not ratios or time.monotonic() - began < TIMING_S):
        ratios.append(time_step(config, given, names) / time_step(config, given, ()))
    return median(ratios)


def _log(line: str) -> None:
    log.info("optimization=auto: %s", escape_control_chars(line))


# -- cache and files ---------------------------------------------------------------------------


def _cache_file(key: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "runner" / "auto" / f"{key}.json"


def read_cache(key: str) -> SearchResult | None:
    """The result of an earlier search, if any; a damaged file is reported and left alone."""
    path = _cache_file(key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            raise ValueError("it is of another version")
        return from_json(SearchResult, stored)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        reason = escape_control_chars(f"{type(error).__name__}: {error}")
        log.warning("%s is damaged and not used (%s); measuring again", path, reason)
        return None


def _as_json(result: SearchResult) -> str:
    """Without secrets; the open end of an interval is null."""
    data = {"schema": SCHEMA, **json_safe(asdict(result))}
    return json.dumps(data, indent=1, default=str) + "\n"


def _write(path: Path, text: str) -> None:
    """A full disk is reported, and no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        log.warning("%s: not written: %s", path, error.strerror)


def as_yaml(optimization: Optimization, reason: str) -> str:
    """A config file of the group `optimization`: what differs from `none`."""
    changed = _changed_keys(optimization)
    typed = [f"optimization.{key}={value}" for key, value in changed.items()]
    nested = OmegaConf.from_dotlist([f"{key}={value}" for key, value in changed.items()])
    body = OmegaConf.merge({"defaults": ["none", "_self_"], "level": "custom"}, nested)
    lines = [
        "# chosen by optimization=auto",
        "#",
        f"# {escape_control_chars(reason)}",
        "# Under conf/optimization/<name>.yaml it is optimization=<name>. The same by hand:",
        f"#   {shlex.join(['python', '-m', 'runner', 'optimization=custom', *typed])}",
    ]
    return "\n".join(lines) + "\n" + OmegaConf.to_yaml(body)


def _changed_keys(optimization: Optimization) -> dict[str, str]:
    """Dotted keys whose values are not those of `none`, as they are typed."""
    ours, plain = asdict(optimization), asdict(Optimization())
    changed = {}
    for key, knobs in ours.items():
        if key in ("level", "auto") or (isinstance(knobs, dict) and not knobs["enabled"]):
            continue
        pairs = knobs.items() if isinstance(knobs, dict) else [("", knobs)]
        for name, value in pairs:
            if value != (plain[key][name] if name else plain[key]):
                changed[f"{key}.{name}".rstrip(".")] = knob_text(value)
    return changed
