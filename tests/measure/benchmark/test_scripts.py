"""The benchmarks in scripts/; bench_claims.py compares claims by whole intervals."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.core.schemas.jobs import BenchmarkConfig
from runner.core.train.loop import train
from runner.measure.benchmark.statistics import Estimate
from tests.measure.benchmark.simulated import World
from tests.runs import command, opened
from tests.runs import config as config_of

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_claims  # noqa: E402
from bench_claims import (  # noqa: E402  # noqa: E402  # noqa: E402
    BETTER,
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    PLAIN_ARM,
    UNDECIDED,
    Claim,
    ClaimResult,
    ClaimRun,
    decide_verdict,
    load_trials,
    measure_claims,
    step_bytes,
)

MLP = ["data=digits", "model=mlp"]
TRIALS = load_trials()
CLAIMS = {claim.name: claim for trial in TRIALS for claim in trial.claims}


def claim(measures: str, bar: float, **more: Any) -> Claim:
    return Claim("it", "so it is said", measures, bar, "note", "arm", **more)


def trial(*claims: Claim, arm: Sequence[str] = ("optimization=basic",)) -> ClaimRun:
    return ClaimRun("digits", list(claims), MLP, {"arm": list(arm)})


def planted(speedup: float = 1.0, reading: float = 1.0, **more: Any) -> World:
    """A world in which the arm is so much faster, and its readings are such a share."""

    def read(arm: str, metric: str) -> list[float]:
        return [(reading if arm == "arm" else 1.0) * scatter for scatter in (1.0, 1.03, 1.06)]

    return World(factors={"arm": 1 / speedup}, readings=read, **more)


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_claims, "compose", lambda overrides: config_of(*overrides))


def measured(world: World, *trials: ClaimRun) -> list[ClaimResult]:
    options = world.options(BenchmarkConfig())
    return measure_claims(trials, "cpu", 60.0 * len(trials), options)[0]


@pytest.mark.parametrize(
    ("measures", "bar", "end", "interval", "noise", "expected"),
    [
        ("speed", 1.2, None, (1.25, 1.3), 0.01, HOLDS),
        ("speed", 1.2, None, (1.05, 1.1), 0.01, FAILS),
        ("speed", 1.2, None, (1.15, 1.25), 0.01, UNDECIDED),
        ("speed", 1.2, None, (1.21, 1.25), 0.05, UNDECIDED),  # the noise exceeds the margin
        ("speed", 1.2, 1.3, (1.4, 1.5), 0.01, BETTER),
        ("latency", 0.6, 0.4, (0.2, 0.3), 0.0, BETTER),
        ("memory", 0.55, None, (0.8, 0.9), 0.0, FAILS),
    ],
)
def test_a_verdict_takes_all_of_the_interval_on_one_side_of_the_bar(
    measures: str, bar: float, end: float, interval: Any, noise: float, expected: str
) -> None:
    estimate = Estimate(sum(interval) / 2, *interval)
    result, reason = decide_verdict(claim(measures, bar, range_end=end), estimate, noise)
    assert result == expected
    assert bool(reason) is (expected == UNDECIDED)


@pytest.mark.parametrize(
    ("name", "effect", "expected"),
    [
        ("torch.compile", {"speedup": 1.25}, HOLDS),
        ("torch.compile: training", {"speedup": 1.3}, FAILS),
        ("compiled inference", {"reading": 0.5}, HOLDS),
        ("recompute: memory", {"reading": 0.35}, BETTER),
        ("recompute: memory", {"reading": 0.95}, FAILS),
        ("memory_efficient: memory", {"reading": 0.79}, UNDECIDED),
        ("flash attention", {"reading": 0.4}, HOLDS),
    ],
)
def test_a_planted_effect_gets_the_verdict_of_its_claim(
    name: str, effect: dict[str, float], expected: str
) -> None:
    tested = replace(CLAIMS[name], arm="arm", needs="")
    (row,) = measured(planted(**effect), trial(tested))  # type: ignore[arg-type]
    assert (row.name, row.verdict, row.claimed) == (name, expected, tested.claimed)
    assert row.interval is not None and row.interval[0] <= (row.ratio or 0) <= row.interval[1]
    assert row.command.endswith("data=digits model=mlp optimization=basic")
    assert (row.noise is None) is (tested.measures != "speed")


@pytest.mark.parametrize("dies", [PLAIN_ARM, "arm"])
def test_what_cannot_be_measured_is_a_row_that_says_why(dies: str) -> None:
    (scaling,) = [tested for tested in TRIALS if tested.gpus]
    idle = trial(claim("speed", 1.5, needs="amp"), arm=["optimization=amp"])
    refused = trial(claim("speed", 1.2), arm=("optimization=basic", "model.width=0"))
    world = planted(holds=lambda name, on: "no Tensor Cores")
    rows = measured(world, scaling, idle, refused)
    assert [(row.verdict, row.ratio) for row in rows] == [(NOT_MEASURABLE, None)] * 3
    assert f"torch sees {torch.cuda.device_count()}" in rows[0].reason and not rows[0].command
    assert rows[1].reason == "amp did not engage: no Tensor Cores"
    assert "model.width" in rows[2].reason
    world = planted(1.5, refuses={dies: ("failed", "it has no memory of that kind")})
    (row,) = measured(world, trial(claim("speed", 1.2)))
    assert row.verdict == NOT_MEASURABLE
    assert f"{dies}: failed: it has no memory of that kind" in row.reason


@pytest.mark.parametrize("tested", [t for t in TRIALS if not t.gpus])
def test_every_claim_composes_with_its_techniques_enabled(tested: ClaimRun) -> None:
    plain = config_of(*tested.work, *tested.plain).optimization
    configs = {name: config_of(*tested.work, *over) for name, over in tested.arms.items()}
    for one in tested.claims:
        config = configs[one.arm]
        on = {name for name, technique in config.optimization.techniques() if technique.enabled}
        assert not one.needs or one.needs in on
        assert config.optimization != plain
        assert one.note


def test_the_memory_of_a_step_includes_the_matrix_of_plain_attention() -> None:
    text = """
        data=stdlib_text data.sequence=512 data.validation_samples=2 model=gpt
        model.width=32 model.depth=1 training.batch_size=4 optimization=custom
        training.steps=2 device.threads=1 optimization.attention.enabled=true
        checkpoint=off
        """.split()
    peaks = {}
    for kernel in ("plain", "flash"):
        with opened(*text, f"optimization.attention.kernel={kernel}") as run:
            train(run)
            peaks[kernel] = min(step_bytes(run) for _ in range(2))
            gradients = [p.grad for p in run.model.parameters()]
            step_bytes(run)
            assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    matrices = 1 * 4 * 4 * 512 * 512 * 4  # layers, samples, heads, tokens, tokens, bytes
    assert peaks["plain"] - peaks["flash"] > 0.5 * matrices


def test_the_page_has_a_row_for_each_claim() -> None:
    typed = "python -m runner optimization=compile"
    rows = [
        ClaimResult("faster", "20–30 % faster", "digits", "speed", HOLDS, 1.31, (1.29, 1.33), 0.011,
                    note="It fuses.", command=typed),
        ClaimResult("slow", "40 % faster", "digits", "latency", FAILS, 2.7, (2.6, 2.8)),
        ClaimResult("absent", "5× | faster", "digits", "memory", reason="no <b>GPU</b>"),
    ]  # fmt: skip
    page = bench_claims.format_claims(rows, {"cpu": "Some CPU", "cores": 4, "device": "cpu"}, 1)
    for part in (
        "| faster | 20–30 % faster | 1.31× (1.29 to 1.33) | 1.1 % | holds |",
        "| slow | 40 % faster | +170 % latency (+160 to +180) | – | does not hold |",
        *("5× \\| faster", "no \\<b\\>GPU", "Some CPU, 4 cores, torch 2", typed),
    ):
        assert part in page
    head = bench_claims.provenance.read_git_state(bench_claims.ROOT)
    assert f"1 minutes; commit {head['commit'][:8] if head else 'unknown'}." in page


@pytest.mark.parametrize("typed", ["experiment=claims", "+benchmark.claims=true"])
def test_claims_in_a_command_name_the_script_that_measures_them(typed: str, tmp_path: Path) -> None:
    done = command(tmp_path, "job=benchmark", typed)
    assert done.returncode == 2
    assert "python scripts/bench_claims.py" in done.stderr and "'claims'" in done.stderr


@pytest.mark.slow
def test_every_benchmark_runs_and_prints_its_table() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_all.py"), "--smoke"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        *("| typo in a key / import torch |", "| tiny | none |", "| heavy-tailed 2 % |"),
        *("1,000 rows, 21 columns", "| tiny | control", "sha256"),
    ):
        assert row in done.stdout, row
