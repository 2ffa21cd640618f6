"""Which claims on speed a sweep makes, from runs and measurements with known numbers in them."""

import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.core.config.composing import compose
from runner.core.record.hydra_files import overrides_by_key
from runner.core.record.summary import StepTime, Throughput
from runner.measure.benchmark.arms import compose_arms
from runner.measure.benchmark.result import BenchmarkResult, Load
from runner.measure.comparison import Comparison, as_json
from runner.measure.comparison_row import ComparisonRow
from runner.measure.discover import compare_folders
from runner.measure.page import _template_context
from runner.measure.speed import FOLDER, benchmark_command
from runner.measure.verdicts import verdict
from tests.measure.planted import arm, reference, result, run, sweep, technique, texts
from tests.measure.test_comparison import shown

FACTS = {"implementation": "fused", "seconds": 0.25}
SLOWER = FACTS | {"seconds": 0.5}
FUSED = technique("fused_optimizer", **FACTS, cache="cold", interval=[0.3], pairs=10)
ENGAGED: dict[str, list[Any]] = {
    "none": [technique("fused_optimizer", "not requested")],
    "basic": [FUSED],
    "ultra": [technique("fused_optimizer", **SLOWER, cache="warm", interval=[0.4], pairs=2)],
}


def planted(
    folder: Path, jobs: list[list[str]], techniques: dict[str, list[Any]] | None = None
) -> Path:
    """A sweep of these jobs: each level is twice as fast as the one before."""
    entries = []
    for number, overrides in enumerate(jobs):
        level = overrides_by_key(overrides).get("optimization", "none")
        rate = 1000.0 * 2 ** [*ENGAGED, "other"].index(level)
        throughput = Throughput(
            rate, None, StepTime(64e3 / rate, 64e3 / rate), other_cpu_share=0.25
        )
        engaged = (techniques or ENGAGED)[level]
        run(folder / str(number), overrides, rate, throughput=throughput, techniques=engaged)
        entries.append({"overrides": overrides, "folder": str(number), "status": "done"})
    return sweep(folder, entries)


def measured(*arms: Any, **more: Any) -> BenchmarkResult:
    return result(*arms, control=None, noise_floor=0.07, **more)


OWN = ["data=cancer", "model._target_=my_package.Net", "security.trusted=[my_package]"]
LEVELS = [[f"optimization={level}"] for level in ENGAGED]


def speeds(comparison: Comparison) -> list[str]:
    return [x for x in texts(comparison) if not x.startswith("Best")]


def test_runs_that_were_not_interleaved_have_no_speed_up_but_times_and_the_load(
    tmp_path: Path,
) -> None:
    comparison = compare_folders([planted(tmp_path, LEVELS)])
    rows = json.loads(as_json(comparison))["rows"]
    assert {row["speedup"] for row in rows} == {None}
    assert {row["summary"]["throughput"]["other_cpu_share"] for row in rows} == {0.25}
    (sentence,) = speeds(comparison)
    assert "none 64 ms" in sentence and "basic and ultra 16 to 32 ms" in sentence
    assert "25 % of the CPUs" in sentence and "fast" not in sentence
    text = shown(comparison, 120)
    assert "others' CPU" in text and "25 %" in text and "to compare speeds: python -m" in text


def test_runs_that_engaged_the_same_are_named_together(tmp_path: Path) -> None:
    comparison = compare_folders([planted(tmp_path, LEVELS)])
    assert "basic and ultra engaged the same: fused optimizer" in comparison.notes


@pytest.mark.parametrize(
    "jobs",
    [
        [["optimizer.lr=0.1"], ["optimizer.lr=0.2"]],
        [["training.batch_size=8"], ["training.batch_size=16"]],
        [["seed=0"], ["seed=1"]],
        [["optimization=basic"], ["optimization=ultra"]],  # which engaged the same
    ],
)
def test_runs_with_the_same_computation_get_no_speed_verdict(
    jobs: list[list[str]], tmp_path: Path
) -> None:
    assert not [x for x in speeds(compare_folders([planted(tmp_path, jobs)])) if "ms" in x]


@pytest.mark.parametrize(
    ("jobs", "arms"),
    [
        (LEVELS, ["none", "basic", "ultra"]),
        ([["optimizer.lr=0.1", "seed=1"], ["optimizer.lr=0.2", "seed=2"]],
         ["optimizer.lr=0.1", "optimizer.lr=0.2"]),
        ([["optimization=none", "debug=full"], ["optimization=basic", "debug=none"]],
         ["optimization=none debug=full", "optimization=basic debug=none"]),
        ([["data=digits", "model.width=8"], ["data=cancer", "model.width=9"]],
         ["model.width=8", "model.width=9"]),
        ([["+optimizer.options.eps=1e-8"], ["++optimizer.options.eps=1e-6"]],
         ["+optimizer.options.eps=1e-8", "++optimizer.options.eps=1e-6"]),
        ([["optimizer=sgd", "~optimizer.options.nesterov"], ["optimizer=adam"]],
         ["optimizer=sgd '~optimizer.options.nesterov'", "optimizer=adam"]),
        ([[*OWN, "+model.arguments.width=8"], [*OWN, "+model.width=9"]],
         ["+model.width=8", "+model.width=9"]),
    ],
)  # fmt: skip
def test_the_command_that_compares_speeds_composes_its_arms(
    jobs: list[list[str]], arms: list[str], tmp_path: Path
) -> None:
    words = shlex.split(compare_folders([planted(tmp_path, jobs)]).speed_command)
    assert words[:3] == ["python", "-m", "runner"] and "job=benchmark" in words
    shared_keys = {word.partition("=")[0] for word in words[3:]}
    assert not shared_keys & {"optimization", "debug", "optimizer.lr", "model.width"}
    assert not [word for word in words[3:] if word[0] in "+~"]
    made = compose_arms(compose(words[3:]).benchmark, words[3:])
    assert [arm.name for arm in made] == arms
    assert len({arm.config.seed for arm in made}) == 1


@pytest.mark.parametrize(
    "jobs",
    [
        [["optimization=none", "distributed=ddp"], ["optimization=basic", "distributed=ddp"]],
        [["data=digits"], ["data=cancer"]],
        [["seed=0"], ["seed=1"]],
    ],
)
def test_no_command_compares_what_a_benchmark_cannot(jobs: list[list[str]], tmp_path: Path) -> None:
    assert compare_folders([planted(tmp_path, jobs)]).speed_command == ""


@pytest.mark.parametrize("kind", ["none", "ddp"])
def test_a_page_of_distributed_runs_advises_no_benchmark(kind: str, tmp_path: Path) -> None:
    jobs = [[f"optimization={level}", f"distributed={kind}"] for level in ("none", "basic")]
    method = _template_context(compare_folders([planted(tmp_path, jobs)]))["method"]
    assert ("job=benchmark measures" in method) == (kind == "none")


def test_configurations_measured_in_turns_give_speed_up_interval_and_headline(
    tmp_path: Path,
) -> None:
    jobs = [[f"optimization={x}", f"seed={n}"] for x in ("none", "basic") for n in range(2)]
    folder = planted(tmp_path, jobs)
    measured(reference(), arm("basic", 1.5, parity=None), load=Load(0.03)).write(folder / FOLDER)
    comparison = compare_folders([folder])
    assert [row.speedup for row in comparison.rows] == pytest.approx([1, 1, 1.5, 1.5])
    ends = [1.5 * math.exp(-0.02), 1.5 * math.exp(0.02)]
    assert json.loads(as_json(comparison))["rows"][3]["speedup_interval"] == pytest.approx(ends)
    grouped = comparison.by_configuration
    assert [verdict(row, grouped) for row in grouped.rows] == ["reference", "faster"]
    headline, load, *_ = texts(comparison)
    assert headline.startswith("basic is 1.50× as fast as none (95 %: 1.47 to 1.53)")
    assert "3.0 % of the CPUs" in load
    assert comparison.speed_command == "" and "speed-up (95 %)" in shown(comparison, 120)


def test_fewer_than_five_turns_give_no_interval_and_no_headline(tmp_path: Path) -> None:
    folder = planted(tmp_path, LEVELS[:2])
    few = measured(reference(), arm("basic", 1.5), blocks=4)
    for one in few.arms:
        one.blocks = 4
    few.write(folder / FOLDER)
    comparison = compare_folders([folder])
    assert comparison.rows[1].speedup_interval is None
    assert verdict(comparison.rows[1], comparison) == "not known"
    assert not [text for text in texts(comparison) if "fast" in text]


def test_the_command_to_compare_speeds_gives_a_shell_the_same_arms_whatever_is_in_a_value() -> None:
    values = ("{betas:[0.9,0.95]}", "{a: 'two words', b: \"it's\"}", "{c: '${x} \\\\ $HOME `id`'}")
    rows = [
        ComparisonRow(
            [x := f"optimizer.options={value}"], "done", command=shlex.join(["runner", x])
        )
        for value in values
    ]
    command = benchmark_command(rows)
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    words = shell.stdout.split("\0")[:-1]
    assert words == shlex.split(command) and words[0] == "runner"
    arms = compose(words[1:]).benchmark.arms
    assert [shlex.split(arm) for arm in arms] == [row.overrides for row in rows]
    levels = [
        ComparisonRow([f"optimization={x}"], "done", command="runner") for x in ("none", "amp")
    ]
    assert shlex.split(benchmark_command(levels))[-1] == "benchmark.arms=[none,amp]"
