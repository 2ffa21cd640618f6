"""Resolve `optimization=auto` to a concrete set of techniques: cache, rule, or search."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from runner.core.build.setup import Components
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.config.composing import compose
from runner.core.config.run_config import RunConfig, config_hash
from runner.core.config.variants import without_side_effects
from runner.core.data.loader import BatchLoader
from runner.core.device.signals import InterruptHandler
from runner.core.errors import RunnerError, WorkerFailure, error_text
from runner.core.findings import Choice
from runner.core.interfaces.batch import call_model
from runner.core.interfaces.run import Run
from runner.core.models.modes import enter_training
from runner.core.record import provenance
from runner.core.record.storage import user_cache, write_or_log
from runner.core.record.text import dataclass_from_json, escape_control_chars, json_safe
from runner.core.schemas.device import FSDP_UNSUPPORTED, DistributedConfig, DistributedKind
from runner.core.schemas.jobs import BenchmarkConfig
from runner.core.schemas.optimization import Optimization
from runner.core.techniques.attention import record_calls
from runner.measure.auto.search import (
    CONTROL_ARM,
    FREE_TECHNIQUES,
    NONE,
    Candidate,
    Search,
    SearchResult,
    make_candidates,
)
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.parity_checker import ParityChecker
from runner.measure.benchmark.result import machine_facts
from runner.measure.benchmark.rounds import MeasureOptions
from runner.measure.parity.plain_runs import copy_components, open_run
from runner.measure.parity.trajectory import make_finite_step

log = logging.getLogger("runner")

KEY = "optimization"
YAML_FILE = "optimization.yaml"
EVIDENCE_FILE = "optimization_evidence.json"
BLOCK_S = 0.2
WARMUP_STEPS = 5
TIMED_STEPS, TIMED_S = 30, 0.5  # caps on the timing of a step at `none`
MIN_TIMEOUT_S = 120.0  # for a candidate to build and compile, however small the budget
MIN_RUN_BUDGETS = 2  # the run must take this many times `budget_s` for a search to be worth it


def resolve_auto(
    config: RunConfig,
    folder: Path | None = None,
    given: Components | None = None,
    search: bool = True,
) -> Components:
    """Return `given` with the techniques that `optimization=auto` selected.

    Other levels are returned unchanged. A resumed run keeps its recorded selection. Without
    `search` nothing is measured. A `folder` gets the selection and its evidence. Raises Interrupted
    and RunnerError; any other failure leaves the selection empty.
    """
    given = given or Components()
    if config.optimization.level != "auto":
        return given
    selection = _read_checkpoint(config, folder)
    if selection is not None:
        return _apply_selection(given, config, selection.split(), "as before the run was resumed")
    if not search:
        return _apply_selection(given, config, [], "this job measures no techniques")
    result = _keep_basic(config, _select_or_none(config, given))
    if folder is not None:
        optimization = enable_techniques(config.optimization, result.techniques)
        _write(folder / YAML_FILE, to_yaml(optimization, result.reason))
        _write(folder / EVIDENCE_FILE, result)
    _announce(f"{result.chosen}: {result.reason}")
    return _apply_selection(given, config, result.techniques, result.reason)


def resolve_config(
    config: RunConfig, folder: Path | None = None, given: Components | None = None
) -> RunConfig:
    """Return the config with `optimization=auto` replaced by its selection."""
    optimization = resolve_auto(config, folder, given).optimization
    return config if optimization is None else replace(config, optimization=optimization)


def resolve_arms(
    arms: Sequence[Arm], folder: Path | None = None, given: Components | None = None
) -> list[Arm]:
    """Resolve `optimization=auto` in each arm of a benchmark that is recorded in `folder`."""
    resolved = []
    for arm in arms:
        arm_folder = folder / arm.folder if folder and arm.folder else None
        resolved.append(replace(arm, config=resolve_config(arm.config, arm_folder, given)))
    return resolved


def make_arms(config: RunConfig, candidates: Sequence[Candidate]) -> list[Arm]:
    """Return arms for `none`, its control, and every candidate."""
    named = [(NONE, []), (CONTROL_ARM, []), *((one.name, one.techniques) for one in candidates)]
    return [Arm(name, _arm_config(config, names)) for name, names in named]


def _arm_config(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """Return the run's config with these techniques, starting at step 0 and writing nothing.

    Of a distributed run it is one process, with its part of each batch.
    """
    arm = without_side_effects(config)
    if config.distributed.kind is not DistributedKind.none:
        from runner.scale.distributed.launch import count_processes
        from runner.scale.distributed.rank_info import detect_rank

        place = detect_rank()  # of torchrun or SLURM, whose processes the config does not count
        count = count_processes(config) if place is None else place.size
        arm.training.batch_size = -(-arm.training.batch_size // count)
        arm.distributed = DistributedConfig()
    arm.optimization = enable_techniques(config.optimization, names)
    arm.checkpoint.resume = "none"
    return arm


def pinned_techniques(optimization: Optimization) -> list[str]:
    """Return the names of the techniques that the config switches on explicitly."""
    return [name for name, technique in optimization.techniques() if technique.enabled]


def enable_techniques(optimization: Optimization, names: Iterable[str]) -> Optimization:
    """Return a copy with these and the pinned techniques on; the level is no longer `auto`."""
    chosen = {*names, *pinned_techniques(optimization)}
    enabled = deepcopy(optimization)
    enabled.level = "custom" if chosen else NONE
    for name, technique in enabled.techniques():
        technique.enabled = name in chosen
    return enabled


def _apply_selection(
    given: Components, config: RunConfig, names: Sequence[str], reason: str
) -> Components:
    enabled = enable_techniques(config.optimization, names)
    value = " ".join(pinned_techniques(enabled)) or NONE
    choice = Choice(KEY, value, escape_control_chars(reason))
    return replace(given, optimization=enabled, chosen=[choice])


def _read_checkpoint(config: RunConfig, folder: Path | None) -> str | None:
    """Return the recorded selection of the run being resumed; None if there is none."""
    resume = config.checkpoint.resume
    resumed = folder if resume == "auto" else None if resume == "none" else Path(resume)
    choices = {} if resumed is None else Checkpointer(None, 1).recorded_choices(resumed)
    return str(choices[KEY]) if KEY in choices else None


# -- measuring -------------------------------------------------------------------------------------


def _select_or_none(config: RunConfig, given: Components) -> SearchResult:
    """Select from the cache, by rule or by a search; most failures become an empty selection."""
    with InterruptHandler() as interrupts:
        try:
            interrupts.begin_wait()  # the processes are ended by the `with` that started them
            return _select(config, given)
        except KeyboardInterrupt:
            raise interrupts.error(" while optimization=auto was measuring") from None
        except WorkerFailure as error:
            problem = f"none {error.status}: {error}"
        except RunnerError:
            raise  # it would end the run as well
        except Exception as error:  # the run will hit the same error, if it is not auto's own
            log.error("optimization=auto failed", exc_info=error, extra={"live": True})
            problem = error_text(error)
    return SearchResult(reason=f"nothing could be measured: {problem}")


def _keep_basic(config: RunConfig, result: SearchResult) -> SearchResult:
    """Return the techniques of `basic` where nothing was selected, unless they were refuted.

    They are refuted if the plainest candidate failed, gave wrong numbers, or was certainly slower.
    """
    plainest = result.tried[0] if result.tried else Candidate(NONE, [])
    slower = plainest.final_interval is not None and plainest.final_interval[1] < 1
    failed = plainest.parity == "FAIL" or plainest.state == "ended"
    if result.techniques or failed or slower:
        return result
    basic = pinned_techniques(compose(["optimization=basic"]).optimization)
    excluded = {*result.left_out, *config.optimization.auto.without}
    if not (names := [name for name in basic if name not in excluded]):
        return result
    reason = f"{result.reason}; undecided, so the techniques of basic are kept"
    return replace(result, chosen=" ".join(names), techniques=names, reason=reason)


def _select(config: RunConfig, given: Components) -> SearchResult:
    auto, estimate = config.optimization.auto, estimate_run(config, given)
    cache = user_cache(os.environ) if auto.cache and given == Components() else None
    path = None if cache is None else cache / "auto" / f"{estimate.key}.json"
    if path is not None and (cached := read_cache(path)) is not None:
        cached.reason += "; measured before, for an earlier run"
        return cached
    seconds = estimate.steps * estimate.step_seconds
    if seconds < MIN_RUN_BUDGETS * auto.budget_s:
        free = [name for name in FREE_TECHNIQUES if name not in estimate.exclusions]
        budget = f"budget_s={auto.budget_s:g} (from {MIN_RUN_BUDGETS * auto.budget_s:g} s)"
        reason = f"the run takes about {seconds:.2g} s at none, too short for a search of "
        reason += f"optimization.auto.{budget}: only free techniques are enabled, by rule"
        result = SearchResult(" ".join(free) or NONE, free, reason, estimate.steps)
        return replace(result, none_ms=1e3 * estimate.step_seconds, left_out=estimate.exclusions)
    result = _run_search(config, given, estimate)
    parity_known = all(row.parity is not None or not row.parity_reason for row in result.tried)
    if path is not None and parity_known:
        _write(path, result)
    return result


def _run_search(config: RunConfig, given: Components, estimate: RunEstimate) -> SearchResult:
    budget_s = config.optimization.auto.budget_s
    candidates = make_candidates({*estimate.exclusions, *pinned_techniques(config.optimization)})
    arms = {arm.name: arm for arm in make_arms(config, candidates)}
    timeout_s = max(MIN_TIMEOUT_S, budget_s)
    settings = BenchmarkConfig(warmup_steps=WARMUP_STEPS, block_s=BLOCK_S, timeout_s=timeout_s)
    _announce(f"{len(candidates)} candidates, for optimization.auto.budget_s={budget_s:g}")
    options = MeasureOptions(settings, given=given, announce=_announce)
    estimates = estimate.steps, estimate.step_seconds
    with ParityChecker(timeout_s, given) as checker:
        search = Search(candidates, arms, options, checker.check, *estimates, budget_s, config.seed)
        return replace(search.run(), left_out=estimate.exclusions)


@dataclass(frozen=True)
class RunEstimate:
    """What is known about a run before the search: its length, step time and cache key."""

    steps: int  # that the run makes
    step_seconds: float  # median step at `none`, device synchronised
    exclusions: dict[str, str]  # excluded techniques, with the reason
    key: str  # of the cache file


def estimate_run(config: RunConfig, given: Components) -> RunEstimate:
    """Build the run at `none`, time a few steps of a copy, and discard it."""
    with open_run(_arm_config(config, ()), given=copy_components(given)) as run:
        shapes = [f"{name} {tuple(p.shape)}" for name, p in run.model.named_parameters()]
        versions = provenance.versions()
        facts = [config_hash(config), shapes, machine_facts(), run.device.name, versions]
        key = sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]
        return RunEstimate(run.total_steps, _time_steps(run), _find_exclusions(run, config), key)


def _time_steps(run: Run) -> float:
    """Return the median seconds of up to `TIMED_STEPS` steps on training batches."""
    enter_training(run.model)
    durations, batches, start_time = list[float](), run.train.batches(0), perf_counter()

    def make_next_step() -> None:
        make_finite_step(run, next(batches))
        run.progress.step += 1

    while len(durations) < TIMED_STEPS:
        if len(durations) >= 2 and perf_counter() - start_time >= TIMED_S:
            break
        durations.append(run.device.seconds_of(make_next_step))
    return median(durations[WARMUP_STEPS:] or durations[-1:])


def _find_exclusions(run: Run, config: RunConfig) -> dict[str, str]:
    """Return the techniques that cannot have an effect or are excluded, each with the reason."""
    with torch.no_grad():
        calls = record_calls(partial(call_model, run.forward, run.train.at(0)[0]), run.model)
    has_convolution = any(isinstance(module, nn.Conv2d) for module in run.model.modules())
    in_memory = isinstance(run.train, BatchLoader) and run.train.fetch.source.in_memory
    no_effect = {
        "channels_last": "" if has_convolution else "no 2-d convolution",
        "attention": "" if calls else "the model does not call scaled_dot_product_attention",
        "pipeline": "the data is in memory" if in_memory else "",
        "tf32": "device.tf32 decides" if config.device.tf32 is not None else "",
    }
    if config.distributed.kind is not DistributedKind.none:
        sharded = config.distributed.kind is DistributedKind.fsdp
        refused = {"whole_step", *(FSDP_UNSUPPORTED if sharded else ())}
        no_effect |= dict.fromkeys(refused, f"not with distributed={config.distributed.kind.value}")
    exclusions = {}
    for name, technique in Optimization().techniques():
        if name in config.optimization.auto.without:
            exclusions[name] = "optimization.auto.without names it"
        elif reason := technique.unavailable(run.device) or no_effect.get(name, ""):
            exclusions[name] = reason
    if "compile" in exclusions:
        exclusions.setdefault("whole_step", exclusions["compile"])
    return exclusions


def _announce(line: str) -> None:
    log.info("optimization=auto: %s", escape_control_chars(line))


# -- cache and files -------------------------------------------------------------------------------


def read_cache(path: Path) -> SearchResult | None:
    """Read a cached search result; None if missing. A damaged file is logged and left in place."""
    try:
        return dataclass_from_json(SearchResult, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = escape_control_chars(error_text(error))
        log.warning("%s is damaged and not used (%s); measuring again", path, reason)
        return None


def _write(path: Path, content: str | SearchResult) -> None:
    """Replace the file's text, a result as JSON; an OSError is logged, not raised."""
    if not isinstance(content, str):
        content = json.dumps(json_safe(asdict(content)), indent=1, default=str) + "\n"
    write_or_log(path, content)


def to_yaml(optimization: Optimization, reason: str) -> str:
    """Return a config file for the group `optimization`: the enabled techniques, over `none`."""
    body: dict[str, Any] = {"defaults": ["none", "_self_"], "level": "custom"}
    body |= {name: asdict(t) for name, t in optimization.techniques() if t.enabled}
    body |= {"extra": optimization.extra} if optimization.extra else {}
    return (
        f"# chosen by optimization=auto\n#\n# {escape_control_chars(reason)}\n"
        "# Under conf/optimization/<name>.yaml it is optimization=<name>.\n"
        + OmegaConf.to_yaml(OmegaConf.create(body))
    )
