from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.table import terminal
from tests.report.planted_results import arm, failed, levels, reference, result


def shown(comparison: Comparison, width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, file=out, force_terminal=False).print(terminal(comparison), crop=False)
    return out.getvalue()


def rows(text: str, *names: str) -> list[str]:
    return [line for line in text.splitlines() if line.split(" ")[0] in names]


def test_eighty_columns_hold_speed_interval_time_memory_and_parity() -> None:
    text = shown(of_benchmark(levels(), None))
    assert max(map(len, text.splitlines())) <= 80
    advanced = rows(text, "advanced")[-1]
    for part in ("1.83×", "1.79–1.87", "0.699", "91,500", "500 MiB", "bf16", "faster"):
        assert part in advanced
    assert len(rows(text, "none", "basic", "ultra")) >= 3


def test_more_columns_say_when_compiling_is_paid_back() -> None:
    text = shown(of_benchmark(levels(), None), 120)
    assert max(map(len, text.splitlines())) <= 120
    assert "11.8 s" in text and "21,400" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_width_loses_a_name_or_a_row(width: int) -> None:
    long = "optimization=ultra model.width=1024 training.batch_size=2048"
    found = of_benchmark(
        result(reference(), arm(long, 1.5), failed("gone", "oom", "too big")), None
    )
    squeezed = "".join(shown(found, width).split())
    assert "model.width=1024" in squeezed and "batch_size=2048" in squeezed
    assert "oom" in squeezed and "toobig" in squeezed


def test_failures_stand_below_with_their_reason_and_one_reason_is_said_once() -> None:
    gone = [failed(f"arm{i}", "killed", "by signal 9") for i in range(3)]
    text = shown(of_benchmark(result(reference(), *gone, failed("big", "oom", "2 GiB")), None), 120)
    assert text.count("by signal 9") == 1
    assert "arm0, arm1 and arm2 killed: by signal 9" in text
    assert "big oom: 2 GiB" in text


def test_the_conclusion_comes_before_the_table_and_parity_is_shouted() -> None:
    bad = arm("turbo", 4.0, parity="FAIL")
    text = shown(of_benchmark(result(reference(), arm("basic", 1.2), bad), None))
    assert text.index("basic is 1.20×") < text.index("speed-up") < text.index("PARITY FAIL\n")
    assert "PARITY FAIL: turbo" in text


def of_sweep(*overrides: str, rates: Sequence[float]) -> Comparison:
    made = [
        Row(
            typed.split(), "done", name=typed, speedup=rate / rates[0],
            summary={"throughput": {"samples_per_second": rate, "step_ms": {"p50": 3.2e4 / rate}},
                     "memory": {"peak_process_bytes": 2**29},
                     "monitor": "val/accuracy", "best": rate / 1e5},
        )
        for typed, rate in zip(overrides, rates, strict=True)
    ]  # fmt: skip
    return Comparison("which", made, reference=overrides[0])


def test_a_sweep_over_what_is_learned_keeps_the_metric_and_lets_memory_go() -> None:
    typed = ["optimizer=adamw optimizer.lr=1e-3", "optimizer=sgd optimizer.lr=1e-2"]
    text = shown(of_sweep(*typed, rates=[20_000.0, 30_000.0]))
    assert "best val/accuracy" in text and "0.3000" in text
    assert "512 MiB" not in text


def test_runs_that_are_equally_fast_are_not_called_the_fastest() -> None:
    seeds = shown(of_sweep("seed=0", "seed=1", "seed=2", rates=[20_000.0, 20_100.0, 20_300.0]))
    assert "samples fast" not in seeds and "Best val/accuracy" in seeds
    levels = ["optimization=none", "optimization=basic"]
    text = shown(of_sweep(*levels, rates=[20_000.0, 20_100.0]))
    assert "No run was more than 5 % slower than another" in text and "fastest" not in text
    text = shown(of_sweep(*levels, rates=[20_000.0, 30_000.0]))
    assert "optimization=basic processed samples 1.50× as fast" in text


def test_a_terminal_names_the_first_rows_and_where_the_others_are() -> None:
    many = [arm(f"arm{i}", 1.1) for i in range(99)]
    text = shown(of_benchmark(result(reference(), *many), None))
    assert "arm58 " in text and "arm59 " not in text
    assert "and 40 more, in comparison.html and comparison.json" in text
