"""`optimization=auto`: what is chosen, what must never be, and what is left behind."""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import psutil
import pytest

from runner.benchmark.agreement import Verdict
from runner.benchmark.auto.advice import sentence
from runner.benchmark.auto.cache import remembered
from runner.benchmark.auto.choose import EVIDENCE, YAML, arms_in, resolved
from runner.benchmark.auto.decide import again, decide, effort, take
from runner.benchmark.auto.search import ALIVE, Search
from runner.benchmark.auto.space import NONE, Space, space_of
from runner.benchmark.auto.tried import Found, Tried
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.statistics import Estimate
from runner.build import build
from runner.config import compose, compose_raw, typed
from runner.errors import ConfigError
from runner.jobs.train import main as train
from tests.benchmark.planted import PlantedCrew

ROOT = Path(__file__).parents[2]

HERE = {name: "not here" for name in ("tf32", "cuda_graphs", "channels_last", "pipeline")}
SPACE = space_of(HERE, [], memory=False)
EFFECTS = {"amp": 0.6, "whole_step": 0.8, "compile": 0.85, "attention": 0.9}
COMPILING_S = 12.0


def factors(space: Space, effects: dict[str, float] = EFFECTS) -> dict[str, float]:
    found = {}
    for one in space.all():
        found[one.name] = 1.0
        for name in one.techniques:
            found[one.name] *= effects.get(name, 1.0)
    return found


def setups(space: Space) -> dict[str, float]:
    return {one.name: COMPILING_S if one.compiles else 1.0 for one in space.all()}


def right(name: str) -> Verdict:
    return Verdict("explained by precision" if "amp" in name else "exact")


def searched(
    crew: PlantedCrew,
    steps: int = 10_000,
    judge: Callable[[str], Verdict] = right,
    budget_s: float = 120.0,
    space: Space = SPACE,
    limit_bytes: float | None = None,
) -> Found:
    search = Search(space, crew, steps, budget_s, 0.2, crew.clock, lambda line: None, crew.seed)
    found = decide(search, judge, limit_bytes)
    assert crew.alive == set()  # nothing is left running
    assert crew.most_alive <= ALIVE
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_an_exhaustive_one_would_to_within_five_percent(seed: int) -> None:
    draw = random.Random(seed)
    effects = {name: draw.uniform(0.6, 1.15) for name in EFFECTS}
    planted = factors(SPACE, effects)
    crew = PlantedCrew(planted, setups=setups(SPACE), noise=0.02, seed=seed)
    found = searched(crew, steps=100_000, budget_s=300.0)
    best = min([1.0, *planted.values()])
    assert planted.get(found.chosen, 1.0) <= 1.05 * best


def test_fewer_are_tried_than_there_are_and_every_one_says_why_it_went() -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE))
    found = searched(crew)
    assert set(found.techniques) >= {"amp", "whole_step", "attention"}
    assert len({name for name in crew.started if name in SPACE_NAMES}) < len(SPACE.all())
    assert all(row.why or row.state == "chosen" for row in found.tried)
    assert {row.state for row in found.tried} <= {"chosen", "ran up", "out", "not tried", "ended"}


SPACE_NAMES = {one.name for one in SPACE.all()}


@pytest.mark.parametrize(("steps", "compiled"), [(400, False), (100_000, True)])
def test_compiling_is_chosen_only_for_a_run_that_is_long_enough_for_it(
    steps: int, compiled: bool
) -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE), none_ms=100.0)
    found = searched(crew, steps=steps, budget_s=300.0)
    assert ("whole_step" in found.techniques) is compiled
    assert "amp" in found.techniques


def test_a_stored_choice_is_made_anew_for_the_number_of_steps_at_hand() -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE), none_ms=100.0)
    found = searched(crew, steps=2_000, budget_s=300.0)
    assert "whole_step" in found.techniques
    again(found, steps=1)
    assert found.chosen == NONE  # every one takes longer to set up than the whole run
    again(found, steps=2_000)
    assert "whole_step" in found.techniques


ALONE = Space((), ("whole_step",), {})


def alone(steps: int, setup: float = 43.0, budget_s: float = 20.0) -> Found:
    """The search of a run whose only candidate saves 15 ms of 59.5 a step."""
    crew = PlantedCrew({"whole_step": 0.75}, none_ms=59.5, setups={"whole_step": setup})
    return searched(crew, steps=steps, budget_s=budget_s, space=ALONE)


def test_an_interval_of_too_few_blocks_is_open_over_the_run_too() -> None:
    row = Tried("amp", ["amp"], final_ratio=3.0, final_interval=(0.0, math.inf))
    assert row.worth(100.0) == (3.0, 0.0, math.inf)
    row.extra_seconds = 50.0
    assert row.worth(100.0) == (pytest.approx(1.2), 0.0, pytest.approx(2.0))


def test_that_compiling_is_not_paid_back_is_said_with_the_steps_from_which_it_would_be() -> None:
    found = alone(2_000)
    why = "compiling (42 s) would not be paid back in 2,000 steps; from about 3,"
    assert found.chosen == NONE
    assert why in found.row("whole_step").why
    assert "over 2,000 steps; with whole_step a step is 1.3" in found.reason
    assert why in found.reason
    assert alone(4_000).chosen == "whole_step"  # as said
    assert found.outgrown(4_000)  # so it is not taken from what is stored
    assert not found.outgrown(2_500)
    stored = alone(4_000)
    again(stored, 1_000)
    assert "would not be paid back in 1,000 steps" in stored.reason


def test_what_compiles_and_got_no_final_says_what_compiling_left_of_it() -> None:
    row = Tried("whole_step", ["whole_step"], "out", extra_seconds=45.3, heat_ratio=1.5)
    found = Found(steps=3_000, none_ms=50.1, noise_floor=0.02, tried=[row])
    take(found, None)
    assert "1.50 times as fast, but compiling (45 s) leaves 1.03 times" in found.reason


def test_what_the_budget_left_is_said() -> None:
    crew = PlantedCrew({}, setups=dict.fromkeys(SPACE_NAMES, 30.0))
    found = searched(crew, budget_s=20.0)
    said, untried = effort(found), sum(row.state == "not tried" for row in found.tried)
    assert untried > 1
    assert f"{len(found.tried) - untried} of {len(found.tried)} candidates tried" in said
    assert f"{untried} not: the budget was spent on others" in said
    assert "optimization.auto.budget_s=20" in said
    assert f"the budget left {untried} of {len(found.tried)} candidates untried" in found.reason
    assert all(row.why and row.state != "running" for row in found.tried)


def test_what_computes_something_else_is_never_chosen_however_fast() -> None:
    def judge(name: str) -> Verdict:
        return Verdict("FAIL", "a wrong mask") if "whole_step" in name else right(name)

    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE))
    found = searched(crew, judge=judge)
    assert "whole_step" not in found.techniques
    assert "amp" in found.techniques  # the others are not lost by it
    wrong = [row for row in found.tried if row.parity == "FAIL"]
    assert wrong
    assert all(row.state == "out" and "a wrong mask" in row.why for row in wrong)
    nobody = searched(PlantedCrew(factors(SPACE)), judge=lambda name: Verdict("FAIL", "wrong"))
    assert nobody.chosen == NONE


def test_what_nobody_could_judge_is_not_chosen() -> None:
    found = searched(PlantedCrew(factors(SPACE)), judge=lambda name: Verdict(None, "killed"))
    assert found.chosen == NONE


def test_a_candidate_beyond_the_memory_budget_is_out() -> None:
    peaks = {name: 3 * 10**9 for name in SPACE_NAMES if "amp" in name}
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE), peaks=peaks)
    found = searched(crew, limit_bytes=2e9)
    assert found.techniques
    assert "amp" not in found.techniques
    over = [row for row in found.tried if (row.peak_bytes or 0) > 2e9]
    assert over
    assert all("memory_budget_mb" in row.why for row in over)


def test_where_none_itself_holds_too_much_what_fits_is_chosen_though_it_is_slower() -> None:
    space = space_of(
        {**HERE, "compile": "x", "whole_step": "x", "amp": "x", "attention": "x"}, [], True
    )
    planted = factors(space, {"recompute": 1.3})
    peaks = {name: 10**9 if "recompute" in name else 3 * 10**9 for name in [NONE, *planted]}
    found = searched(PlantedCrew(planted, peaks=peaks), space=space, limit_bytes=2e9)
    assert "recompute" in found.techniques


@pytest.mark.parametrize(("seed", "noise"), list(product(range(10), (0.02, 0.1))))
def test_where_nothing_is_faster_it_stays_at_none(seed: int, noise: float) -> None:
    crew = PlantedCrew({}, setups={name: 1.0 for name in SPACE_NAMES}, noise=noise, seed=seed)
    assert searched(crew).chosen == NONE


def test_what_is_no_faster_than_the_same_process_once_more_is_not_chosen() -> None:
    lucky = {name: 0.95 for name in [*SPACE_NAMES, "none again"]}  # by where its memory lies, say
    crew = PlantedCrew(lucky, setups={name: 1.0 for name in SPACE_NAMES}, noise=0.005)
    assert searched(crew).chosen == NONE


def test_what_is_slower_is_not_chosen() -> None:
    crew = PlantedCrew({name: 1.2 for name in SPACE_NAMES}, setups=setups(SPACE))
    assert searched(crew).chosen == NONE


def test_a_candidate_that_ends_costs_itself_alone() -> None:
    ended = {name: ArmEnded("oom", "no memory") for name in SPACE_NAMES if "whole_step" in name}
    found = searched(PlantedCrew(factors(SPACE), setups=setups(SPACE), ended=ended))
    assert "amp" in found.techniques
    assert all(row.state == "ended" for row in found.tried if row.why == "oom: no memory")
    with pytest.raises(ArmEnded):
        searched(PlantedCrew({}, ended={NONE: ArmEnded("failed", "a bug")}))


def test_the_budget_is_kept_but_for_what_was_begun() -> None:
    slow = {name: 40.0 for name in SPACE_NAMES if "compile" in name}
    crew = PlantedCrew(factors(SPACE), setups=slow)
    searched(crew, budget_s=60.0)
    assert crew.now < 60 + 40 + 30


def test_a_space_is_small_and_leaves_out_what_can_do_nothing() -> None:
    everything = space_of({}, [], memory=True)
    assert len(everything.all()) <= 16
    assert not any(
        "recompute" in o.techniques and "whole_step" in o.techniques for o in everything.all()
    )
    names = [*HERE, "amp", "compile", "whole_step", "attention"]
    bare = space_of(dict.fromkeys(names, "no"), [], memory=False)
    assert [one.name for one in bare.all()] == ["system fused_optimizer"]
    assert not any("amp" in one.techniques for one in space_of(HERE, ["amp"], False).all())


# -- in real runs ------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "runner" / "auto"


LONG = [
    "optimization=auto", "model.width=512", "training.steps=20000", "training.batch_size=256",
    "optimization.auto.budget_s=2", "optimization.auto.without=[compile,whole_step]",
    "optimization.auto.advise=false", "checkpoint=off",
]  # fmt: skip


def test_a_real_search_leaves_a_config_to_commit_the_evidence_and_a_choice_to_take_again(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose(LONG)
    given = resolved(config, tmp_path / "run")
    assert given.optimization is not None
    asked = [name for name, t in given.optimization.techniques() if t.enabled]
    evidence = json.loads((tmp_path / "run" / EVIDENCE).read_text())
    assert evidence["techniques"] == asked
    rows = {row["name"]: row for row in evidence["tried"]}
    assert "system fused_optimizer" in rows
    assert all(row["why"] or row["state"] == "chosen" for row in rows.values())
    if evidence["chosen"] != NONE:
        assert rows[evidence["chosen"]]["parity"] != "FAIL"
        assert rows[evidence["chosen"]]["final_interval"][0] > 1
    assert evidence["left_out"]["compile"] == "optimization.auto.without names it"

    # the file is an option of the group, and its command says the same
    folder = tmp_path / "conf" / "optimization"
    folder.mkdir(parents=True)
    text = (tmp_path / "run" / YAML).read_text()
    (folder / "mine.yaml").write_text(text)
    by_file = typed(compose_raw(["optimization=mine"], folders=[tmp_path / "conf"])).optimization
    command = next(line for line in text.splitlines() if "python -m runner" in line)
    by_hand = compose(shlex.split(command.removeprefix("#"))[3:]).optimization
    for other in (by_file, by_hand):
        assert other.techniques() == given.optimization.techniques()

    # another run of the same kind measures nothing
    (stored,) = own_cache.glob("*.json")
    before = len(multiprocessing.active_children())
    again_given = resolved(config, tmp_path / "second")
    assert again_given.optimization == given.optimization
    assert "measured before" in again_given.chosen[0].reason
    assert len(multiprocessing.active_children()) == before

    stored.write_text("{half a")
    assert remembered(stored.stem) is None
    assert "is damaged and not used" in caplog.text


def test_a_run_too_short_for_a_search_takes_what_is_free_and_says_so(
    tmp_path: Path, own_cache: Path
) -> None:
    summary = train(compose(["optimization=auto", "training.steps=30"]), tmp_path)
    (choice,) = [c for c in summary.choices if c.key == "optimization"]
    assert choice.value in ("system fused_optimizer", NONE)
    assert "budget_s=60 is for runs of 120 s" in choice.reason
    assert not own_cache.exists()
    asked = {row.name for row in summary.techniques if row.requested}
    assert asked == set(choice.value.split()) - {NONE}
    assert (tmp_path / YAML).is_file()


def test_a_run_that_is_continued_keeps_what_it_had_chosen(tmp_path: Path, own_cache: Path) -> None:
    first = train(compose(["optimization=auto", "training.steps=20"]), tmp_path)
    more = ["optimization=auto", "training.steps=40", "checkpoint.resume=auto"]
    second = train(compose(more), tmp_path)
    chosen = [[c for c in s.choices if c.key == "optimization"][0] for s in (first, second)]
    assert chosen[0].value == chosen[1].value
    assert chosen[1].reason == "as before the run was resumed"
    assert second.steps == 40


def test_what_is_switched_on_by_name_is_on_in_every_candidate() -> None:
    config = compose(["optimization=auto", "optimization.amp.enabled=true"])
    space = space_of(HERE, ["amp"], memory=False)
    arms = arms_in(config, space)
    assert all(arm.config.optimization.amp.enabled for arm in arms)
    assert [arm.name for arm in arms][:2] == [NONE, "none again"]
    assert all(not arm.config.checkpoint.enabled for arm in arms)


def test_auto_is_refused_where_nobody_resolved_it() -> None:
    with pytest.raises(ConfigError, match="found out by measuring"):
        build(compose(["optimization=auto"]))


@pytest.mark.parametrize(
    ("key", "value"), [("budget_s", "0"), ("memory_budget_mb", "-1"), ("without", "[ampp]")]
)
def test_a_knob_that_is_wrong_is_named(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"optimization.auto.{key}"):
        compose(["optimization=auto", f"optimization.auto.{key}={value}"])


def test_ctrl_c_ends_the_search_and_every_process_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner", *LONG, "optimization.auto.budget_s=5",
               "training.steps=100000", f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "none: up" in line:
                    break
            family = psutil.Process(process.pid).children(recursive=True)
            assert family
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait(60) == 130, rest
        finally:
            process.kill()
    assert "while optimization=auto was measuring" in rest
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_a_batch_size_is_advised_only_where_it_is_clearly_better() -> None:
    assert sentence(64, 32, Estimate(1.4, 1.35, 1.46)).startswith(
        "training.batch_size=64 would be 1.40 times as efficient per sample as 32 (1.35 to 1.46)"
    )
    assert sentence(64, 32, Estimate(1.4, 0.9, 1.8)) == ""
    assert sentence(64, 32, Estimate(1.02, 1.01, 1.03)) == ""


@pytest.mark.slow
def test_the_choice_is_within_five_percent_of_an_exhaustive_search(own_cache: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_auto", ROOT / "scripts" / "bench_auto.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look themselves up there
    spec.loader.exec_module(script)
    found = script.compare("mlp", script.MODELS["mlp"], steps=50_000, budget_s=60, each_s=3)
    assert found.kept, script.table([found])
