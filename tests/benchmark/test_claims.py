"""Claims are data, measured against the plain run; a verdict follows from the whole interval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import build, compose, train
from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Turn
from runner.benchmark.claims import (
    PLAIN,
    Claim,
    ClaimTrial,
    load_trials,
    measure_claims,
    step_bytes,
    verdict,
)
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.result import (
    BETTER,
    FAILS,
    HOLDS,
    UNDECIDED,
    UNKNOWN,
    ClaimResult,
    Claims,
)
from runner.benchmark.rounds import MeasureOptions
from runner.benchmark.statistics import Estimate
from runner.benchmark.workers.messages import Finished, Ready
from runner.errors import Interrupted
from runner.report import claims as report
from runner.training.run import Run

MLP = ["data=digits", "model=mlp"]
TRIALS = load_trials()
CLAIMS = {claim.name: claim for trial in TRIALS for claim in trial.claims}


def claim(measures: str, bar: float, **more: Any) -> Claim:
    return Claim("it", "so it is said", measures, bar, "note", "arm", **more)


def trial(*claims: Claim, arm: Sequence[str] = ("optimization=basic",)) -> ClaimTrial:
    return ClaimTrial("digits", list(claims), MLP, {"arm": list(arm)})


@dataclass
class PlantedPool:
    """In place of a worker pool: every arm but the plain one has planted times and memory."""

    speedup: float = 1.0
    step_bytes: float = 1e8
    latency: float = 1.0  # of a compiled forward over an eager one
    dies: str = ""
    refuses: str = ""  # why the technique does not engage
    stops_at: int = 10**9  # turns until Ctrl-C
    tools: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    turns: int = 0

    def clock(self) -> float:
        return self.now

    def __call__(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        self.metrics = metrics or {}
        return self

    def __enter__(self) -> PlantedPool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, name: str) -> Ready:
        if name == self.dies:
            raise ArmEnded("failed", "it has no memory of that kind")
        return Ready(32, 1.0, 0.1, 10.0)

    def turn(self, name: str, seconds: float) -> Turn:
        self.turns += 1
        if self.turns > self.stops_at:
            raise KeyboardInterrupt
        self.now += seconds
        ms = 10.0 * (1 + 0.01 * (self.turns * 7 % 5))
        ms /= self.speedup if name == "arm" else 1.0
        return Turn(25, 800, 25 * ms / 1e3, ms, ms / 32)

    def finish(self, name: str) -> Finished:
        held = self.step_bytes if name == "arm" else 1e8
        engaged = {"engaged": not self.refuses, "reason": self.refuses}
        summary = {
            "techniques": [{"name": "amp", "requested": True, **engaged}],
            "tools": self.tools,
            "steps": 1000,
        }
        readings = {
            key: (self.latency if key.startswith("latency") else held) * (1 + 0.01 * i)
            for i, key in enumerate(self.metrics)
        }
        return Finished(summary, [], [], readings)


def measured(planted: PlantedPool, *trials: ClaimTrial) -> Claims:
    config = compose(["experiment=claims"])
    config.benchmark = BenchmarkConfig(budget_s=60.0 * len(trials))
    how = MeasureOptions(config.benchmark, pool=planted, clock=planted.clock)
    return measure_claims(config, trials=trials, options=how)


@pytest.mark.parametrize(
    ("measures", "bar", "end", "interval", "noise", "expected"),
    [
        ("speed", 1.2, None, (1.25, 1.3), 0.01, HOLDS),
        ("speed", 1.2, None, (1.05, 1.1), 0.01, FAILS),
        ("speed", 1.2, None, (1.15, 1.25), 0.01, UNDECIDED),
        ("speed", 1.2, None, (1.21, 1.25), 0.05, UNDECIDED),  # the noise exceeds the margin
        ("speed", 1.2, 1.3, (1.4, 1.5), 0.01, BETTER),
        ("cost", 1.2, None, (1.9, 2.1), 0.01, FAILS),
        ("cost", 2.0, 1.5, (1.0, 1.2), 0.01, BETTER),
        ("memory", 0.55, None, (0.8, 0.9), 0.0, FAILS),
    ],
)
def test_a_verdict_takes_all_of_the_interval_on_one_side_of_the_bar(
    measures: str,
    bar: float,
    end: float | None,
    interval: tuple[float, float],
    noise: float,
    expected: str,
) -> None:
    estimate = Estimate(sum(interval) / 2, *interval)
    found, reason = verdict(claim(measures, bar, range_end=end), estimate, noise)
    assert found == expected
    assert bool(reason) is (expected == UNDECIDED)


@pytest.mark.parametrize(
    ("name", "planted", "expected"),
    [
        ("torch.compile", {"speedup": 1.25}, HOLDS),
        ("torch.compile: training", {"speedup": 1.3}, FAILS),
        ("compiled inference", {"latency": 0.5}, HOLDS),
        ("compiled inference", {"latency": 0.95}, FAILS),
        ("compiled inference", {"latency": 0.2}, BETTER),
        ("recompute: memory", {"step_bytes": 3.5e7}, BETTER),
        ("recompute: memory", {"step_bytes": 9.5e7}, FAILS),
        ("memory_efficient: memory", {"step_bytes": 7.9e7}, UNDECIDED),
        ("flash attention", {"step_bytes": 4e7}, HOLDS),
    ],
)
def test_a_planted_effect_gets_the_verdict_of_its_claim(
    name: str, planted: dict[str, float], expected: str
) -> None:
    tested = replace(CLAIMS[name], arm="arm", needs="")
    (row,) = measured(PlantedPool(**planted), trial(tested)).rows  # type: ignore[arg-type]
    assert (row.name, row.verdict, row.said) == (name, expected, tested.claimed)
    assert row.interval is not None and row.interval[0] <= (row.ratio or 0) <= row.interval[1]
    assert row.command.endswith("data=digits model=mlp optimization=basic")
    assert (row.noise is None) is (tested.measures != "speed")


def test_a_cost_includes_what_a_tool_took_in_a_run() -> None:
    tools = [{"name": "memory", "looks": 3, "seconds": 2.0}]
    plain, once = claim("cost", 1.2), claim("cost", 1.2, tool="memory", run_steps=100)
    rows = measured(PlantedPool(1 / 1.5, tools=tools), trial(plain, once)).rows
    assert rows[0].ratio == pytest.approx(1.5, abs=0.03)
    assert rows[1].ratio == pytest.approx(1.5 + 2.0 / (100 * 0.0102), abs=0.06)
    assert [row.verdict for row in rows] == [FAILS, FAILS]


def test_several_gpus_are_not_measurable_here() -> None:
    (scaling,) = [tested for tested in TRIALS if tested.gpus]
    (row,) = measured(PlantedPool(), scaling).rows
    assert (row.verdict, row.ratio, row.command) == (UNKNOWN, None, "")
    assert f"torch sees {torch.cuda.device_count()}" in row.reason


def test_a_technique_that_is_not_engaged_is_not_measurable_and_says_why() -> None:
    tested = trial(claim("speed", 1.5, needs="amp"))
    (row,) = measured(PlantedPool(refuses="no Tensor Cores"), tested).rows
    assert (row.verdict, row.ratio) == (UNKNOWN, None)
    assert row.reason == "amp did not take hold: no Tensor Cores"


@pytest.mark.parametrize("dies", [PLAIN, "arm"])
def test_a_trial_that_fails_is_a_row_and_the_others_continue(dies: str) -> None:
    faster = trial(claim("speed", 1.2))
    refused = trial(claim("speed", 1.2), arm=("optimization=basic", "model.width=0"))
    rows = measured(PlantedPool(1.5, dies=dies), faster, refused).rows
    assert [row.verdict for row in rows] == [UNKNOWN, UNKNOWN]
    assert f"{dies}: failed: it has no memory of that kind" in rows[0].reason
    assert "model.width" in rows[1].reason


def test_ctrl_c_keeps_the_rows_that_are_done() -> None:
    kept: list[int] = []
    planted = PlantedPool(1.5, stops_at=60)
    config = compose(["experiment=claims"])
    config.benchmark = BenchmarkConfig(budget_s=90.0)
    how = MeasureOptions(config.benchmark, pool=planted, clock=planted.clock)
    trials = [trial(claim("speed", 1.2))] * 9
    with pytest.raises(Interrupted):
        measure_claims(config, None, lambda found: kept.append(len(found.rows)), trials, how)
    assert kept and kept == list(range(1, len(kept) + 1)) and len(kept) < 9


@pytest.mark.parametrize("tested", [t for t in TRIALS if not t.gpus])
def test_every_trial_composes_with_what_it_needs_switched_on(tested: ClaimTrial) -> None:
    work = [*tested.work, *(["data.path=images"] if tested.images else [])]
    plain = compose([*work, *tested.plain]).optimization
    for one in tested.claims:
        config = compose([*work, *tested.arms[one.arm]])
        on = {name for name, technique in config.optimization.techniques() if technique.enabled}
        tools = {n for n in ("anomaly", "gradcheck", "memory") if getattr(config.debug, n).enabled}
        assert not one.needs or one.needs in on
        assert not one.tool or one.tool in tools
        assert tools or config.optimization != plain
        assert one.note and one.run_steps in (None, config.training.steps)


def test_the_claims_of_the_texts_are_all_there() -> None:
    text = " ".join(f"{one.name}: {one.claimed};" for one in CLAIMS.values())
    for part in (
        *("torch.compile: training: 2–3× faster", "compiled inference: 40–60 % less latency"),
        *("recompute: memory: 20–40 %", "micro-batches: memory: 20–40 %", "linear scaling"),
        *("memory_efficient: memory: 20–40 %", "mixed precision", "channels-last: faster"),
    ):
        assert part in text


def test_a_claim_of_ones_own_is_one_yaml_block(tmp_path: Path) -> None:
    block = {"name": "mine", "claimed": "2×", "measures": "speed", "bar": 2, "note": "n"}
    (tmp_path / "mine.yaml").write_text(json.dumps({"trials": [{"about": "x", "claims": [block]}]}))
    (own,) = load_trials(tmp_path)
    assert own.claims == [Claim("mine", "2×", "speed", 2, "n")]


def trained(*overrides: str) -> Run:
    run = build(compose([*overrides, "training.steps=3", "monitoring=quiet", "checkpoint=off"]))
    train(run)
    return run


def test_the_memory_of_a_step_includes_the_matrix_of_plain_attention() -> None:
    text = [
        "data=stdlib_text",
        "data.sequence=512",
        "data.validation_samples=2",
        "model=gpt",
        "model.width=64",
        "training.batch_size=4",
        "optimization=custom",
        "optimization.attention.enabled=true",
    ]
    held = {}
    for kernel in ("plain", "flash"):
        with trained(*text, f"optimization.attention.kernel={kernel}") as run:
            held[kernel] = min(step_bytes(run) for _ in range(2))
            gradients = [p.grad for p in run.model.parameters()]
            step_bytes(run)
            assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    matrices = 4 * 4 * 4 * 512 * 512 * 4  # layers, samples, heads, tokens, tokens, bytes
    assert held["plain"] - held["flash"] > 0.5 * matrices


ROWS = [
    ClaimResult(
        "faster",
        "20–30 % faster",
        "digits",
        "speed",
        HOLDS,
        1.31,
        (1.29, 1.33),
        0.011,
        why="It fuses.",
        command="python -m runner optimization=compile",
    ),
    ClaimResult("costly", "+10–20 % time", "digits", "cost", FAILS, 2.7, (2.6, 2.8), 0.011),
    ClaimResult("small", "half the memory", "digits", "memory", FAILS, 0.9, (0.88, 0.91)),
    ClaimResult("absent", "5× | faster", "digits", "speed", UNKNOWN, reason="no <b>GPU</b>"),
]
MACHINE = {"cpu": "Some CPU", "cores": 4, "device": "cpu"}
RESULT = Claims(ROWS, MACHINE, {"torch": "2.13.0"}, {"others": 0.4}, "python -m runner x=claims")


def test_the_page_and_the_table_have_a_row_for_each_claim(tmp_path: Path) -> None:
    report.write(RESULT, tmp_path)
    page = (tmp_path / "claims.md").read_text()
    for part in (
        "| faster | 20–30 % faster | 1.31× (1.29 to 1.33) | 1.1 % | holds |",
        "| costly | +10–20 % time | +170 % time (+160 to +180) | 1.1 % | does not hold |",
        *("−10 % memory (−12 to −9)", "5× \\| faster", "no \\<b\\>GPU", "x=claims"),
        *("Some CPU, 4 cores, torch 2.13.0", "Other processes took 40% of the CPUs"),
        "python -m runner optimization=compile",
    ):
        assert part in page
    found = json.loads((tmp_path / "claims.json").read_text())
    assert [row["verdict"] for row in found["rows"]] == [row.verdict for row in ROWS]
    assert found["rows"][0]["interval"] == [1.29, 1.33]
