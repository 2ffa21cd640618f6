"""`optimization=auto`: from a config that leaves it open to the techniques that a run is made with.

Measured on the run's own model, data and device, unless an earlier run of the same kind did that.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from runner.benchmark.agreement import Judge, Verdict
from runner.benchmark.arms import Arm
from runner.benchmark.auto import advice, cache
from runner.benchmark.auto.budget import OVER
from runner.benchmark.auto.decide import again, decide, effort
from runner.benchmark.auto.look import Look, arm_config, look_at
from runner.benchmark.auto.search import AGAIN, Search
from runner.benchmark.auto.short import by_rule, too_short
from runner.benchmark.auto.space import NONE, Space, in_order, pinned, space_of, switched_on
from runner.benchmark.auto.tried import Found
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Crew
from runner.build import Given
from runner.checkpoint.checkpointer import Checkpointer
from runner.config import RunConfig
from runner.errors import RunnerError, StorageError
from runner.interrupts import Interrupts
from runner.record.text import escape_control_chars
from runner.storage import replace_text
from runner.technique import Choice
from runner.techniques.config import Optimization

log = logging.getLogger("runner")

KEY = "optimization"
YAML = "optimization.yaml"
EVIDENCE = "optimization_evidence.json"
BLOCK_S = 0.2
WARM_UP = 5  # steps
LEAST_S = 120.0  # that an arm may take to build and compile, however small the budget


def resolved(
    config: RunConfig, folder: Path | None = None, given: Given | None = None, search: bool = True
) -> Given:
    """What to build the run with: `given`, and what `optimization=auto` came to.

    Any other level is left as it is. A run that is continued keeps what it had chosen. Without
    `search` nothing is measured. With a `folder`, the choice is written there as a config file,
    with the evidence beside it. Raises Interrupted; what else goes wrong costs only the choice.
    """
    given = given or Given()
    if config.optimization.level != "auto":
        return given
    before = _recorded(config, folder)
    if before is not None:
        names = _known(before)
        return _with(given, config, names, "as before the run was resumed")
    if not search:
        return _with(given, config, [], "nothing is measured for this job")
    found = _measured(config, given)
    if folder is not None:
        _write(config, found, folder)
    for line in found.advice:
        log.info("optimization=auto: advice: %s", line)
    log.info("optimization=auto: %s: %s", found.chosen, found.reason)
    return _with(given, config, found.techniques, found.reason)


def settled(config: RunConfig, folder: Path | None = None, given: Given | None = None) -> RunConfig:
    """The same config with the choice of `optimization=auto` in its place."""
    optimization = resolved(config, folder, given).optimization
    return config if optimization is None else replace(config, optimization=optimization)


def settled_arms(
    arms: Sequence[Arm], folder: Path | None = None, given: Given | None = None
) -> list[Arm]:
    """The same for arms of a benchmark that will be recorded in `folder`."""
    return [
        replace(arm, config=settled(arm.config, folder and folder / arm.folder, given))
        for arm in arms
    ]


def _with(given: Given, config: RunConfig, names: list[str], reason: str) -> Given:
    value = " ".join(in_order([*names, *pinned(config.optimization)])) or NONE
    return replace(
        given,
        optimization=switched_on(config.optimization, names),
        chosen=[Choice(KEY, value, escape_control_chars(reason))],
    )


def _recorded(config: RunConfig, folder: Path | None) -> str | None:
    """What the run that is continued was made with, if it had to choose."""
    resume = config.checkpoint.resume
    where = folder if resume == "auto" else None if resume == "none" else Path(resume)
    if where is None:
        return None
    value = Checkpointer(None, 1).recorded(where).get(KEY)
    return None if value is None else str(value)


def _known(names: str) -> list[str]:
    return list(in_order(names.split()))


def _measured(config: RunConfig, given: Given) -> Found:
    """Look, remember, or search; whatever fails, there is a choice."""
    auto = config.optimization.auto
    with Interrupts() as interrupts:
        interrupts.waiting = True  # what runs is ended with the `with` that it is in
        try:
            look = look_at(config, given)
            found = cache.remembered(look.key) if auto.cache else None
            if found is not None and not found.outgrown(look.steps):
                again(found, look.steps)
                found.reason += "; measured before, for an earlier run"
                _say(f"found in {cache.cache_folder() / look.key}.json; nothing is measured anew")
            elif why := too_short(config, look):
                found = by_rule(config, given, look, why)
            else:
                found = _searched(config, given, look)
                if auto.cache and not found.unjudged():
                    cache.remember(look.key, found)
            found.facts = look.facts
            return found
        except KeyboardInterrupt:
            raise interrupts.error(" while optimization=auto was measuring") from None
        except ArmEnded as error:
            return Found(reason=f"nothing could be measured: none {error.status}: {error}")
        except RunnerError:
            raise  # it would end the run as well
        except Exception as error:  # the run itself will say it, if it meets it
            log.error("optimization=auto failed", exc_info=error, extra={"live": True})
            return Found(reason=f"nothing could be measured: {type(error).__name__}: {error}")


def _searched(config: RunConfig, given: Given, look: Look) -> Found:
    auto = config.optimization.auto
    limit = None if auto.memory_budget_mb is None else auto.memory_budget_mb * 2**20
    space = space_of(look.reasons, pinned(config.optimization), limit is not None)
    arms = arms_in(config, space)
    settings = BenchmarkConfig(
        warmup_steps=WARM_UP, block_s=BLOCK_S, timeout_s=max(LEAST_S, auto.budget_s)
    )
    log.info(
        "optimization=auto: %d candidates, for %g s (optimization.auto.budget_s), %g s at most",
        len(space.all()), auto.budget_s, OVER * auto.budget_s,
    )  # fmt: skip
    by_name = {arm.name: arm for arm in arms}
    with Crew(arms, settings, None, given) as crew, Judge(settings.timeout_s, given) as judge:
        search = Search(
            space, crew, look.steps, auto.budget_s, BLOCK_S, time.monotonic, _say, config.seed
        )

        def judged(name: str, within_s: float) -> Verdict:
            return judge.judge(by_name[name], None, within_s, partial(_say_waiting, name))

        found = decide(search, judged, limit)
    _say(effort(found))
    if limit is None and all(row.state == "not tried" for row in found.tried):
        takes = search.budget.starting(compiles=False) * 2 + search.budget.finishing()
        why = (
            f"a search takes {takes:.0f} s or more here: optimization.auto.budget_s="
            f"{auto.budget_s:g} is too small for one"
        )
        return by_rule(config, given, look, why)
    chosen = None if found.chosen == NONE else found.row(found.chosen)
    found.advice = advice.advice_on(chosen)
    left = auto.budget_s - found.seconds
    needed = 0.0 if chosen is None else 2 * chosen.setup_seconds
    if auto.advise and left > max(10.0, needed):
        sizes = advice.batch_sizes(config, look)
        found.advice += advice.time_batch_sizes(
            config, given, found.techniques, sizes, settings, left, _say
        )
    return found


def arms_in(config: RunConfig, space: Space) -> list[Arm]:
    """`none`, `none` again, and every candidate."""
    arms = [Arm(name, arm_config(config, ())) for name in (NONE, AGAIN)]
    return arms + [Arm(one.name, arm_config(config, one.techniques)) for one in space.all()]


def _say_waiting(name: str, seconds: float) -> None:
    _say(f"{name}: its numbers are still being judged, {seconds:.0f} s by now")


def _say(line: str) -> None:
    log.info("optimization=auto: %s", escape_control_chars(line))


# -- what is left behind -----------------------------------------------------------------------


def _write(config: RunConfig, found: Found, folder: Path) -> None:
    """`optimization.yaml` to commit, and the evidence; a full disk costs no more than these."""
    optimization = switched_on(config.optimization, found.techniques)
    texts = {
        YAML: as_yaml(optimization, found.reason),
        EVIDENCE: json.dumps(cache.as_dict(found), indent=2, default=str) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_text(folder / name, text)
    except OSError as error:
        log.warning("%s", StorageError(f"{folder / YAML}: not written: {error.strerror}"))


def as_yaml(optimization: Optimization, reason: str) -> str:
    """A config file of the group `optimization`: what differs from `none`."""
    changed = differences(optimization)
    body: dict[str, Any] = {"defaults": ["none", "_self_"], "level": "custom", **changed}
    command = shlex.join(["python", "-m", "runner", "optimization=custom", *overrides(changed)])
    lines = [
        "# chosen by optimization=auto",
        "#",
        f"# {escape_control_chars(reason)}",
        "# Under conf/optimization/<name>.yaml it is optimization=<name>. The same by hand:",
        f"#   {command}",
    ]
    text: str = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + "\n" + text


def differences(optimization: Optimization) -> dict[str, Any]:
    """Keys and values that are not those of `none`, nested as in a config file."""
    ours, plain = _plain(asdict(optimization)), _plain(asdict(Optimization()))
    found: dict[str, Any] = {}
    for key, value in ours.items():
        if key in ("level", "auto"):
            continue
        if isinstance(value, dict):
            inner = {k: v for k, v in value.items() if v != plain[key][k]}
            if inner and value.get("enabled", True):
                found[key] = inner
        elif value != plain[key]:
            found[key] = value
    return found


def overrides(changed: Mapping[str, Any], path: str = "optimization") -> list[str]:
    """The same as it is typed."""
    found: list[str] = []
    for key, value in changed.items():
        if isinstance(value, dict):
            found += overrides(value, f"{path}.{key}")
        else:
            found.append(f"{path}.{key}={_typed(value)}")
    return found


def _typed(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return json.dumps(value) if isinstance(value, bool | None) else str(value)


def _plain(value: Any) -> Any:
    """Enums by their names, as they are typed."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return getattr(value, "name", value)
