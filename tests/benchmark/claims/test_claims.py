from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from runner import build, compose, train
from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Turn
from runner.benchmark.claims.claims import measure_claims, verdict
from runner.benchmark.claims.gauges import (
    TIMES,
    compiled_latency,
    int8_speedup,
    state_bytes,
    step_bytes,
)
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
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Finished, Ready
from runner.benchmark.heat import With
from runner.benchmark.statistics import Estimate
from runner.compiler import facts
from runner.config import JobKind
from runner.errors import Interrupted
from runner.report import claims as report
from runner.run import Run

MLP = ("data=digits", "model=mlp")


def statement(quantity: Quantity, bar: float, **more: Any) -> Statement:
    return Statement("it", "so it is said", quantity, bar, "arm", **more)


def trial(*statements: Statement, arm: tuple[str, ...] = ("optimization=basic",)) -> Trial:
    return Trial("digits", MLP, {"arm": arm}, statements)


@dataclass
class Planned:
    """In place of `Crew`: every arm but the plain one is so much faster, and holds so much."""

    speedup: float = 1.0
    step_bytes: float = 1e8
    latency: float = 1.0  # of a compiled forward over an eager one
    dies: str = ""
    refuses: str = ""  # why the technique does not take hold
    stops_at: int = 10**9  # turns until Ctrl-C
    tools: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    turns: int = 0

    def clock(self) -> float:
        return self.now

    def crew(
        self, arms: Sequence[Arm], settings: BenchmarkConfig, folder: Path | None,
        given: Any = None, metrics: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        self.metrics = metrics or {}
        return self

    def __enter__(self) -> Planned:
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
        rows = [{"name": "amp", "requested": True, "engaged": not self.refuses,
                 "reason": self.refuses}]  # fmt: skip
        summary = {"techniques": rows, "tools": self.tools, "steps": 1000}
        readings = {
            key: (self.latency if key.startswith("compiled_latency") else held) * (1 + 0.01 * i)
            for i, key in enumerate(self.metrics)
        }
        return Finished(summary, [], [], readings)


def measured(planned: Planned, *trials: Trial, **settings: Any) -> Claims:
    config = compose(["experiment=claims"])
    config.benchmark = BenchmarkConfig(budget_s=60.0 * len(trials), **settings)
    how = With(config.benchmark, crew=planned.crew, clock=planned.clock)
    return measure_claims(config, trials=trials, how=how)


def test_what_lies_past_the_far_end_of_a_range_is_better_than_said() -> None:
    for quantity, bar, most, inside, past in (
        (Quantity.speed, 1.2, 1.3, (1.25, 1.5), (1.4, 1.5)),
        (Quantity.cost, 2.0, 1.5, (1.4, 1.8), (1.0, 1.2)),
    ):
        said = replace(statement(quantity, bar), most=most)
        found = [verdict(said, Estimate(1.0, *ends), 0.01)[0] for ends in (inside, past)]
        assert found == [HOLDS, BETTER]


@pytest.mark.parametrize(
    ("quantity", "bar", "interval", "noise", "expected"),
    [
        (Quantity.speed, 1.2, (1.25, 1.3), 0.01, HOLDS),
        (Quantity.speed, 1.2, (2.5, 2.6), 0.01, HOLDS),  # more than claimed
        (Quantity.speed, 1.2, (1.05, 1.1), 0.01, FAILS),
        (Quantity.speed, 1.2, (1.15, 1.25), 0.01, UNDECIDED),
        (Quantity.speed, 1.2, (1.21, 1.25), 0.05, UNDECIDED),  # the noise is larger than the margin
        (Quantity.cost, 1.2, (1.1, 1.15), 0.01, HOLDS),
        (Quantity.cost, 1.2, (1.9, 2.1), 0.01, FAILS),
        (Quantity.memory, 0.55, (0.5, 0.52), 0.0, HOLDS),
        (Quantity.memory, 0.55, (0.8, 0.9), 0.0, FAILS),
        (Quantity.inference, 1.4, (1.5, 1.6), 0.0, HOLDS),
    ],
)
def test_a_claim_holds_or_does_not_where_all_of_the_interval_is_on_one_side(
    quantity: Quantity, bar: float, interval: tuple[float, float], noise: float, expected: str
) -> None:
    seen = Estimate(sum(interval) / 2, *interval)
    found, reason = verdict(statement(quantity, bar), seen, noise)
    assert found == expected
    assert bool(reason) is (expected == UNDECIDED)


@pytest.mark.parametrize(("speedup", "expected"), [(1.5, HOLDS), (1.05, FAILS), (0.8, FAILS)])
def test_a_planted_speedup_is_seen_and_judged(speedup: float, expected: str) -> None:
    (row,) = measured(Planned(speedup), trial(statement(Quantity.speed, 1.2))).rows
    assert row.interval is not None and row.interval[0] <= speedup <= row.interval[1]
    assert row.verdict == expected
    assert row.noise is not None and row.noise < 0.05
    assert row.command.endswith("data=digits model=mlp optimization=basic")


def test_a_cost_is_the_other_way_round_and_has_what_a_tool_took_in_a_run() -> None:
    tools = [{"name": "memory", "looks": 3, "seconds": 2.0}]
    plain, once = statement(Quantity.cost, 1.2), statement(
        Quantity.cost, 1.2, tool="memory", run_steps=100
    )  # fmt: skip
    found = measured(Planned(1 / 1.5, tools=tools), trial(plain, once)).rows
    assert found[0].ratio == pytest.approx(1.5, abs=0.03)
    assert found[1].ratio == pytest.approx(1.5 + 2.0 / (100 * 0.0102), abs=0.06)
    assert [row.verdict for row in found] == [FAILS, FAILS]


def test_memory_is_compared_by_six_readings_of_each() -> None:
    whole, step = statement(Quantity.memory, 0.55), statement(Quantity.step_memory, 0.55)
    found = measured(Planned(step_bytes=4e7), trial(whole, step)).rows
    assert [row.ratio for row in found] == pytest.approx([0.4, 0.4])
    for row in found:
        assert row.interval is not None and row.interval[0] < 0.4 < row.interval[1]
        assert (row.verdict, row.noise) == (HOLDS, None)


RANGES = [s for tried in TRIALS for s in tried.statements if s.most is not None]
GAINS = (Quantity.speed, Quantity.inference)


@pytest.mark.parametrize("said", RANGES, ids=lambda said: said.name)
def test_each_range_that_is_claimed_is_judged_by_where_the_interval_lies(said: Statement) -> None:
    assert said.most is not None
    gain, bar, most = said.quantity in GAINS, said.bar, said.most
    assert (most > bar) is gain
    middle, short, beyond = (bar + most) / 2, bar - (most - bar) / 2, most + (most - bar) / 2

    def judged(center: float, half: float) -> str:
        return verdict(said, Estimate(center, center - half, center + half), 0.0)[0]

    narrow = abs(most - bar) / 8
    assert [judged(x, narrow) for x in (middle, short, beyond)] == [HOLDS, FAILS, BETTER]
    assert judged(bar, narrow) == UNDECIDED
    assert judged(most, narrow) == HOLDS  # all of it reaches what is claimed at least


@pytest.mark.parametrize(
    ("name", "planted", "expected"),
    [("torch.compile: training", {"speedup": 2.5}, HOLDS),
     ("torch.compile: training", {"speedup": 1.3}, FAILS),
     ("torch.compile: training", {"speedup": 2.01}, UNDECIDED),
     ("mixed precision: training", {"speedup": 2.2}, HOLDS),
     ("mixed precision: training", {"speedup": 0.7}, FAILS),
     ("compiled inference", {"latency": 0.5}, HOLDS),
     ("compiled inference", {"latency": 0.95}, FAILS),
     ("compiled inference", {"latency": 0.59}, UNDECIDED),
     ("compiled inference", {"latency": 0.2}, BETTER),
     ("recompute: memory", {"step_bytes": 7e7}, HOLDS),
     ("recompute: memory", {"step_bytes": 3.5e7}, BETTER),
     ("recompute: memory", {"step_bytes": 9.5e7}, FAILS),
     ("micro-batches: memory", {"step_bytes": 6.8e7}, HOLDS),
     ("memory_efficient: memory", {"step_bytes": 7.9e7}, UNDECIDED)],
)  # fmt: skip
def test_a_planted_effect_gets_the_verdict_of_its_claim(
    name: str, planted: dict[str, float], expected: str
) -> None:
    said = next(s for tried in TRIALS for s in tried.statements if s.name == name)
    (row,) = measured(Planned(**planted), trial(replace(said, arm="arm", needs=""))).rows
    assert (row.name, row.verdict) == (name, expected)
    assert row.ratio is not None and row.interval is not None


def test_what_takes_two_gpus_is_not_measurable_here_and_says_so_without_a_trial() -> None:
    (scaling,) = [tried for tried in TRIALS if tried.gpus]
    (row,) = measured(Planned(), scaling).rows
    assert (row.verdict, row.ratio, row.command) == (UNKNOWN, None, "")
    there = torch.cuda.device_count()
    assert f"torch sees {there}" in row.reason
    assert ("takes 2 GPUs" in row.reason) is (there < 2)


def test_the_latency_of_compiled_inference_is_that_of_a_compiled_model() -> None:
    with trained(*MLP, "optimization=none") as run, pytest.raises(ValueError, match="not compiled"):
        compiled_latency(run)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_compiled_and_eager_forwards_are_timed_in_turn() -> None:
    asked = ("optimization=custom", "optimization.compile.enabled=true")
    with trained(*MLP, *asked) as run:
        before = facts()["graphs"]
        assert 0.01 < compiled_latency(run) < 100
        assert facts()["graphs"] >= before  # of inference, or that of validation again


def test_a_technique_that_does_not_take_hold_is_not_measurable_and_says_why() -> None:
    needy = statement(Quantity.speed, 1.5, needs="amp")
    (row,) = measured(Planned(1.0, refuses="no Tensor Cores"), trial(needy)).rows
    assert (row.verdict, row.ratio) == (UNKNOWN, None)
    assert row.reason == "amp did not take hold: no Tensor Cores"


@pytest.mark.parametrize("dies", [PLAIN, "arm"])
def test_a_trial_that_fails_is_a_row_and_the_others_go_on(dies: str) -> None:
    faster = trial(statement(Quantity.speed, 1.2))
    refused = trial(statement(Quantity.speed, 1.2), arm=("optimization=basic", "model.width=0"))
    found = measured(Planned(1.5, dies=dies), faster, refused)
    assert [row.verdict for row in found.rows] == [UNKNOWN, UNKNOWN]
    assert f"{dies}: failed: it has no memory of that kind" in found.rows[0].reason
    assert "model.width" in found.rows[1].reason


def test_ctrl_c_keeps_the_rows_that_are_done() -> None:
    kept: list[int] = []
    planned = Planned(1.5, stops_at=60)
    config = compose(["experiment=claims"])
    config.benchmark = BenchmarkConfig(budget_s=90.0)
    how = With(config.benchmark, crew=planned.crew, clock=planned.clock)
    trials = [trial(statement(Quantity.speed, 1.2))] * 9
    with pytest.raises(Interrupted):
        measure_claims(config, None, lambda found: kept.append(len(found.rows)), trials, how)
    assert kept and kept == list(range(1, len(kept) + 1)) and len(kept) < 9


@pytest.mark.parametrize("tried", TRIALS, ids=lambda t: t.statements[0].name)
def test_every_trial_is_a_config_with_what_it_needs_switched_on(tried: Trial) -> None:
    if tried.gpus:
        assert not tried.arms  # nothing here could be run
        return
    folder = ["data.path=images"] if tried.images else []
    plain = compose([*tried.work, *folder, *tried.plain]).optimization
    for said in tried.statements:
        config = compose([*tried.work, *folder, *tried.arms[said.arm]])
        on = {name for name, technique in config.optimization.techniques() if technique.enabled}
        assert not said.needs or said.needs in on
        assert said.why and said.said
        assert said.run_steps in (None, config.training.steps)
        tools = {name for name in ("anomaly", "gradcheck", "memory")
                 if getattr(config.debug, name).enabled}  # fmt: skip
        assert not said.tool or said.tool in tools
        assert tools or config.optimization != plain


def test_the_statements_that_people_make_are_all_there() -> None:
    said = " ".join(f"{s.name}: {s.said};" for tried in TRIALS for s in tried.statements)
    for part in (
        "torch.compile: 20–30 % faster", "1.5–2× faster", "half the memory", "2–3×", "80 %",
        "tuned loader: 20–30 %", "channels-last: faster", "+10–20 %", "+50–100 %", "below +5 %",
        "40–60 % faster", "5× faster", "90 % less", "torch.compile: training: 2–3× faster",
        "compiled inference: 40–60 % less latency", "recompute: memory: 20–40 % less memory",
        "micro-batches: memory: 20–40 %", "memory_efficient: memory: 20–40 %", "1.5–3× faster",
        "linear scaling",
    ):  # fmt: skip
        assert part in said


def test_the_experiment_is_one_command_of_a_few_minutes() -> None:
    config = compose(["experiment=claims"])
    assert config.job.kind is JobKind.benchmark and config.benchmark.claims
    assert config.benchmark.budget_s <= 240


def trained(*overrides: str) -> Run:
    config = compose([*overrides, "training.steps=3", "monitoring=quiet", "checkpoint=off"])
    run = build(config)
    train(run)
    return run


TEXT = ("data=stdlib_text", "data.sequence=512", "data.validation_samples=2", "model=gpt",
        "model.width=64", "training.batch_size=4", "optimization=custom",
        "optimization.attention.enabled=true")  # fmt: skip


def test_a_steps_memory_sees_the_matrix_that_attention_written_out_holds() -> None:
    held = {}
    for kernel in ("plain", "flash"):
        with trained(*TEXT, f"optimization.attention.kernel={kernel}") as run:
            held[kernel] = min(step_bytes(run) for _ in range(2))
            gradients = [p.grad for p in run.model.parameters()]
            step_bytes(run)
            assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    matrices = 4 * 4 * 4 * 512 * 512 * 4  # layers, samples, heads, tokens, tokens, bytes
    assert held["plain"] - held["flash"] > 0.5 * matrices


def test_the_state_is_weights_and_what_the_optimizer_keeps() -> None:
    with trained(*MLP, "optimization=none") as run:
        weights = sum(p.nbytes for p in run.model.parameters())
        assert 3 * weights <= state_bytes(run) < 3.1 * weights  # and two moments of AdamW


def test_int8_is_timed_against_float_and_only_where_there_is_an_int8_model() -> None:
    quantized = ("optimization.quantization.enabled=true", "optimization.quantization.max_drop=9")
    with trained(*MLP, "optimization=custom", *quantized) as run:
        assert run.quantized is not None
        assert 0.01 < int8_speedup(run) < 100
    with trained(*MLP, "optimization=none") as run, pytest.raises(ValueError, match="no int8"):
        int8_speedup(run)


ROWS = [
    ClaimResult("faster", "20–30 % faster", "digits", "speed", HOLDS, 1.31, (1.29, 1.33), 0.011,
                why="It fuses.", command="python -m runner optimization=compile"),
    ClaimResult("costly", "+10–20 % time", "digits", "cost", FAILS, 2.7, (2.6, 2.8), 0.011),
    ClaimResult("small", "half the memory", "digits", "memory", FAILS, 0.9, (0.88, 0.91)),
    ClaimResult("absent", "5× | faster", "digits", "speed", UNKNOWN, reason="no <b>GPU</b>"),
]  # fmt: skip
FOUND = Claims(ROWS, {"cpu": "Some CPU", "cores": 4, "device": "cpu"}, {"torch": "2.13.0"},
               {"others": 0.4}, "python -m runner experiment=claims")  # fmt: skip


def test_the_page_has_a_row_for_each_claim_and_says_where_it_was_measured() -> None:
    page = report.markdown(FOUND)
    assert "| faster | 20–30 % faster | 1.31× (1.29 to 1.33) | 1.1 % | holds |" in page
    assert "| costly | +10–20 % time | +170 % time (+160 to +180) | 1.1 % | does not hold |" in page
    assert "−10 % memory (−12 to −9)" in page
    assert "5× \\| faster" in page and "no \\<b\\>GPU" in page
    assert "Some CPU, 4 cores, torch 2.13.0" in page
    assert "Other processes took 40% of the CPUs" in page
    assert "python -m runner experiment=claims" in page
    assert "python -m runner optimization=compile" in page


def test_the_table_on_the_terminal_fits_and_shows_reasons() -> None:
    screen = Console(width=80, record=True, file=StringIO())
    screen.print(report.show(FOUND))
    text = screen.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for row in ROWS:
        assert row.name in text
    assert "no <b>GPU</b>" in text


def test_both_files_are_written_whole(tmp_path: Path) -> None:
    report.write(FOUND, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["claims.json", "claims.md"]
    found = json.loads((tmp_path / "claims.json").read_text())
    assert [row["verdict"] for row in found["rows"]] == [row.verdict for row in ROWS]
    assert found["rows"][0]["interval"] == [1.29, 1.33]
    assert TIMES >= 6  # fewer readings would hold the median in less than 95 %


@pytest.mark.slow
def test_the_claim_about_anomaly_mode_is_measured_in_real_processes(tmp_path: Path) -> None:
    config = compose(["experiment=claims", "benchmark.budget_s=8", "benchmark.narrow=0.2"])
    slow = ("optimization=none", "debug=anomaly")
    tried = trial(statement(Quantity.cost, 1.2), arm=slow)

    def keep(found: Claims) -> None:
        report.write(found, tmp_path)

    found = measure_claims(config, None, keep, [tried])
    (row,) = found.rows
    assert row.ratio is not None and row.ratio > 1.2 and row.verdict == FAILS
    assert found.machine["cores"] >= 1
    assert (tmp_path / "claims.md").exists()
