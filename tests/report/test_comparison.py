from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.benchmark.result import Load
from runner.report import comparison as report
from runner.report.__main__ import main
from runner.report.columns import COLUMNS
from runner.report.comparison import of_benchmark
from runner.report.curves import read_curves, thin_curve
from runner.report.discover import of_folders
from runner.report.naming import names
from runner.report.verdicts import conclusion, verdict
from tests.report.planted_results import arm, attribution, failed, levels, reference, result
from tests.report.planted_runs import job, run, sweep, texts

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "overrides status reason summary speedup speedup_interval parity command".split()
HOSTILE = '=cmd|"x" <b>*bold*</b> | `code`\n\x1b[31m\u202e ünï 名前'


def test_rows_are_named_by_what_differs_between_them() -> None:
    two = [["optimization=none", "seed=1", "+a.b=x"], ["optimization=ultra", "seed=2", "+a.b=x"]]
    assert names(two, ["0", "1"]) == ["optimization=none seed=1", "optimization=ultra seed=2"]
    assert names([["a.lr=1e-3"], ["a.lr=2"]], ["0", "1"]) == ["lr=1e-3", "lr=2"]
    two = [["a.x=1", "b.x=1", "c.lr=1"], ["a.x=2", "b.x=2", "c.lr=2"]]
    assert names(two, ["0", "1"]) == ["a.x=1 b.x=1 lr=1", "a.x=2 b.x=2 lr=2"]
    assert names([["seed=1"], []], ["0", "1"]) == ["seed=1", "default"]
    assert names([["a=1"], ["a=1"], ["a=2"]], ["x/0", "y/0", "z/0"]) == [
        "a=1 (x/0)",
        "a=1 (y/0)",
        "a=2",
    ]
    assert names([[], []], ["runs/one", "runs/two"]) == ["one", "two"]
    assert len(set(names([["a=1"]] * 3, ["", "", ""]))) == 3


def test_the_winner_is_the_first_that_no_other_is_measurably_faster_than() -> None:
    first = texts(of_benchmark(levels(), None))[0]
    assert first == (
        "advanced is 1.83× as fast as none (95 %: 1.79 to 1.87), with the same numbers but for "
        "bf16; ultra is not measurably faster than advanced."
    )


def test_an_arm_that_trains_something_else_is_not_crowned() -> None:
    narrow = arm("narrow", 5.5, other_work=["model"])
    found = of_benchmark(result(reference(), arm("basic", 1.2), narrow), None)
    first, second = texts(found)
    assert first.startswith("basic is 1.20× as fast as none")
    assert second.startswith("narrow trains something else than none (another model): it is 5.50×")
    assert second.endswith("its numbers are those of its own plain run to the bit.")
    numbers = next(column for column in COLUMNS if column.key == "parity").text(found.rows[2])
    assert (verdict(found.rows[2], found), numbers) == ("faster, other work", "exact, other model")
    alone = of_benchmark(result(reference(), narrow), None)
    assert not any("same numbers" in text for text in texts(alone))


def test_a_headline_claims_what_the_engine_claimed_and_names_an_unsteady_machine() -> None:
    caveat = ", on an unsteady machine (other processes took 76 % of the CPUs, noise floor ± 16 %)"
    more: Any = {"load": Load(others=0.76), "noise_floor": 0.16}
    for arms, expected in (
        ([arm("ultra", 2.2)], f"to the bit{caveat}."),
        ([arm("slow", 0.5, "slower")], f"No arm is measurably faster than none{caveat}."),
    ):
        assert texts(of_benchmark(result(reference(), *arms, **more), None))[0].endswith(expected)
    arms = [arm("a", 1.3, ""), arm("b", 1.01, "same")]
    first, *others = texts(of_benchmark(result(reference(), *arms), None))
    assert first == "No arm is measurably faster than none."
    assert "b makes no difference." in others
    assert any("a is faster or slower is not known" in text for text in others)


def test_an_arm_with_other_numbers_never_wins_and_is_shouted() -> None:
    wrong = arm("turbo", 9.0, parity="FAIL", parity_reason="the gradient is off")
    idle = arm("idle", 8.0, problems=["no parameter changed"])
    found = of_benchmark(result(reference(), arm("basic", 1.2), wrong, idle), None)
    said = conclusion(found)
    assert said[0].text.startswith("basic is 1.20×")
    shouted = " ".join(sentence.text for sentence in said if sentence.tone == "shout")
    assert "PARITY FAIL: turbo" in shouted and "the gradient is off" in shouted
    assert "idle does not train: no parameter changed" in shouted


def test_the_json_keeps_the_contract_and_has_no_nan(tmp_path: Path) -> None:
    bad = arm("ultra", 1.5, data_wait=math.nan, step_ms_p95=math.inf)
    found = of_benchmark(result(reference(), bad, failed("x", "oom", HOSTILE)), tmp_path)
    report.write(found, tmp_path)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    tree = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=refuse)
    assert [list(row)[:8] for row in tree["rows"]] == [CONTRACT] * 3
    measured = tree["rows"][1]["measured"]
    assert (measured["data_wait"], measured["step_ms_p95"]) == (None, None)
    assert tree["rows"][1]["speedup_interval"] == pytest.approx([1.47, 1.53], abs=0.01)
    assert tree["rows"][2]["reason"] == HOSTILE
    assert str(tmp_path) not in json.dumps(tree)


def test_the_markdown_escapes_what_nobody_has_vetted(tmp_path: Path) -> None:
    wild = arm(HOSTILE, 1.5, command="echo ```")
    told = result(reference(), wild, failed("x", "failed", HOSTILE), attribution=attribution())
    report.write(of_benchmark(told, tmp_path), tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    assert "<b>" not in text and "\x1b" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        columns = {re.sub(r"\\.", "", line).count("|") for line in table.splitlines()}
        assert len(columns) == 1, table  # no name opens or closes a cell
    outside = re.sub(r"^````.*?^````", "", text, flags=re.M | re.S)
    assert "\\*bold\\*" in outside and "*bold*" not in outside.replace("\\*", "")
    assert "What each technique" in text and "What failed" in text
    for _ in range(2):  # TensorBoard has the same text, however often it is written
        report.write(of_benchmark(told, tmp_path), tmp_path)
    (events,) = (tmp_path / "comparison").iterdir()
    assert b"What each technique" in events.read_bytes()


def test_a_disk_that_takes_nothing_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert report.write(of_benchmark(levels(), None), tmp_path / "file") == []
    assert {"comparison.json", "comparison.html"} <= {
        record.getMessage().split(":")[0].rpartition("/")[2] for record in caplog.records
    }
    assert (tmp_path / "file").read_text() == ""


def test_files_written_elsewhere_still_lead_to_the_runs(tmp_path: Path) -> None:
    run(tmp_path / "runs" / "a", ["seed=1"])
    run(tmp_path / "runs" / "b", ["seed=2"])
    report.write(of_folders([tmp_path / "runs"]), tmp_path / "x" / "y")
    tree = json.loads((tmp_path / "x" / "y" / "comparison.json").read_text())
    for row in tree["rows"]:
        assert (tmp_path / "x" / "y" / row["folder"] / "summary.json").is_file()


def command(*typed: str, cwd: Path, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner.report", *typed],
        cwd=cwd,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_compares_two_sweeps(tmp_path: Path) -> None:
    for name, level in (("one", "none"), ("two", "ultra")):
        folder = sweep(tmp_path / name, [job(0, level)])
        run(folder / "0", [f"optimization={level}"], 2000.0 if name == "two" else 1000.0)
    done = command("one", "two", "--out", "both", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ultra" in done.stdout and "2.00×" in done.stdout and "tensorboard" in done.stdout
    files = {path.name for path in (tmp_path / "both").iterdir()}
    assert {"comparison.json", "comparison.md", "comparison.html"} <= files


def test_a_wrong_command_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for typed in ([], ["nowhere"], ["--what"]):
        assert main(typed) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert shown.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []
    helped = command("--help", cwd=tmp_path)
    assert helped.returncode == 0 and "--out" in helped.stdout


def test_what_lies_in_the_current_folder_stands_in_for_no_package(tmp_path: Path) -> None:
    for name in ("rich", "hydra", "yaml", "omegaconf"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    done = command("nowhere", cwd=tmp_path, path=f"{ROOT}:")
    assert done.returncode == 2 and "no such folder" in done.stderr


def test_a_curve_keeps_its_spikes_and_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    steps = [*range(1, 2001), *range(1500, 3001)]
    lines = [
        {"step": s, "split": "train", "loss": 99.0 if s == 777 else 3 - s / 1000} for s in steps
    ]
    lines.append({"step": 3001, "split": "train", "loss": None})
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\nnot json "train"\n')
    curve = read_curves(tmp_path)["train/loss"]
    assert [step for step, _ in curve] == list(range(1, 3001))
    thinned = thin_curve(curve, 100)
    assert len(thinned) <= 100
    assert (777.0, 99.0) in thinned
    assert thinned == sorted(thinned)


def test_what_could_not_be_measured_is_left_open_everywhere(tmp_path: Path) -> None:
    few = arm("few", 1.5, "", speedup_interval=(0.0, math.inf), losses=[math.nan, 2.0, 1.0])
    none = arm("odd", math.nan, "", speedup_interval=None, losses=[])
    found = of_benchmark(result(reference(), few, none), tmp_path)
    report.write(found, tmp_path)
    assert texts(found)[0] == "No arm is measurably faster than none."
    for name in ("comparison.html", "comparison.md", "comparison.json"):
        text = (tmp_path / name).read_text()
        assert not re.search(r"\b(nan|NaN|inf|Infinity)\b", text), name
    assert "too few blocks" in (tmp_path / "comparison.md").read_text()
