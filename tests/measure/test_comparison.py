"""What a comparison says: headline, table on the terminal, markdown, JSON; and the command."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.core.record.summary import StepTime, Throughput
from runner.measure import page
from runner.measure.benchmark.result import Load
from runner.measure.columns import COLUMNS, select_columns
from runner.measure.comparison import Comparison, compare_arms
from runner.measure.comparison_row import ComparisonRow
from runner.measure.curves import downsample_curve, read_curves
from runner.measure.discover import compare_folders
from runner.measure.naming import name_rows
from runner.measure.page import write_comparison
from runner.measure.table import ComparisonScreen
from runner.measure.verdicts import conclusion, verdict
from runner.report import main
from runner.scale.sweep.search_record import SearchRecord, SearchTrial
from tests import runs
from tests.measure.planted import (
    arm,
    attribution,
    failed,
    job,
    levels,
    reference,
    result,
    run,
    sweep,
    technique,
    texts,
)

CONTRACT = "overrides status reason summary speedup speedup_interval parity command".split()
HOSTILE = '=cmd|"x" <b>*bold*</b> | `code`\n\x1b[31m\u202e ünï 名前'


def compared(*arms: Any, **more: Any) -> Comparison:
    return compare_arms(result(reference(), *arms, **more), None)


NAMES = {
    "a.x=none seed=1 +a.b=x | a.x=ultra seed=2 +a.b=x": "x=none seed=1 | x=ultra seed=2",
    "level=none | level=ultra": "none | ultra",
    "a.lr=1e-3 | a.lr=2": "lr=1e-3 | lr=2",
    "a.x=1 b.x=1 c.lr=1 | a.x=2 b.x=2 c.lr=2": "a.x=1 b.x=1 lr=1 | a.x=2 b.x=2 lr=2",
    "seed=1 | ": "seed=1 | default",
    "a=1 | a=1 | a=2": "a=1 (x/0) | a=1 (y/0) | a=2",
    " | ": "x/0 | y/0",
}


@pytest.mark.parametrize("typed", NAMES)
def test_rows_are_named_by_what_differs_between_them(typed: str) -> None:
    rows = [row.split() for row in typed.split(" | ")]
    assert name_rows(rows, ["x/0", "y/0", "z/0"][: len(rows)]) == NAMES[typed].split(" | ")
    assert len(set(name_rows([["a=1"]] * 3, ["", "", ""]))) == 3


def test_the_winner_is_the_first_that_no_other_is_measurably_faster_than() -> None:
    assert texts(compare_arms(levels(), None))[0] == (
        "advanced is 1.83× as fast as none (95 %: 1.79 to 1.87), with the same numbers up to "
        "bf16 rounding; ultra is not measurably faster than advanced."
    )


def test_an_arm_that_trains_something_else_is_not_crowned() -> None:
    narrow = arm("narrow", 5.5, other_work=["model"])
    found = compared(arm("basic", 1.2), narrow)
    first, second = texts(found)
    assert first.startswith("basic is 1.20× as fast as none")
    assert second.startswith("narrow does different work from none (another model): it is 5.50×")
    assert second.endswith("its numbers match its own plain run bit for bit.")
    numbers = next(column for column in COLUMNS if column.key == "parity").text(found.rows[2])
    assert (verdict(found.rows[2], found), numbers) == ("faster, other work", "exact, other model")
    assert not any("same numbers" in text for text in texts(compared(narrow)))
    untested = arm("narrow", 5.5, other_work=["model"], parity="")
    expected = "its parity with the plain run not tested."
    assert any(text.endswith(expected) for text in texts(compared(untested)))


def test_a_headline_claims_what_the_engine_claimed_and_names_an_unsteady_machine() -> None:
    caveat = ", on an unsteady machine (other processes used 76 % of the CPUs, noise floor ± 16 %)"
    more: Any = {"load": Load(others=0.76), "noise_floor": 0.16}
    assert texts(compared(arm("ultra", 2.2), **more))[0].endswith(f"bit for bit{caveat}.")
    slow = texts(compared(arm("slow", 0.5, "slower"), **more))[0]
    assert slow == f"No arm is measurably faster than none{caveat}."
    first, *others = texts(compared(arm("a", 1.3, ""), arm("b", 1.01, "same")))
    assert first == "No arm is measurably faster than none."
    assert "Without a difference from none: b." in others
    assert any("Not known to be faster or slower: a (" in text for text in others)


def test_an_arm_with_other_numbers_never_wins_and_is_shouted() -> None:
    wrong = arm("turbo", 9.0, parity="FAIL", parity_reason="the gradient is off")
    idle = arm("idle", 8.0, problems=["no parameter changed"])
    found = compared(arm("basic", 1.2), wrong, idle)
    sentences = conclusion(found)
    assert sentences[0].text.startswith("basic is 1.20×")
    shouted = " ".join(sentence.text for sentence in sentences if sentence.tone == "shout")
    assert "PARITY FAIL: turbo" in shouted and "the gradient is off" in shouted
    assert "idle does not train: no parameter changed" in shouted
    text = shown(found)
    assert text.index("basic is 1.20×") < text.index("speed-up")
    assert "PARITY FAIL" in text[text.index("speed-up") :]


# files


def test_the_json_keeps_the_contract_and_has_no_nan(tmp_path: Path) -> None:
    bad = arm("ultra", 1.5, data_wait=math.nan, step_ms_p95=math.inf)
    page.write_comparison(compared(bad, failed("x", "oom", HOSTILE)), tmp_path)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    tree = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=refuse)
    assert [list(row)[:8] for row in tree["rows"]] == [CONTRACT] * 3
    measured = tree["rows"][1]["measured"]
    assert (measured["data_wait"], measured["step_ms_p95"]) == (None, None)
    assert tree["rows"][1]["speedup_interval"] == pytest.approx([1.47, 1.53], abs=0.01)
    assert tree["rows"][2]["reason"] == HOSTILE
    assert str(tmp_path) not in json.dumps(tree)


def test_the_markdown_escapes_untrusted_text(tmp_path: Path) -> None:
    wild = arm(HOSTILE, 1.5, command="echo ```")
    found = compared(wild, failed("x", "failed", HOSTILE), attribution=attribution())
    for _ in range(2):  # TensorBoard has the same text, however often it is written
        page.write_comparison(found, tmp_path)
    (events,) = (tmp_path / "comparison").iterdir()
    assert b"Speed-up by technique" in events.read_bytes()
    text = (tmp_path / "comparison.md").read_text()
    assert "<b>" not in text and "\x1b" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        columns = {re.sub(r"\\.", "", line).count("|") for line in table.splitlines()}
        assert len(columns) == 1, table  # no name opens or closes a cell
    outside = re.sub(r"^````.*?^````", "", text, flags=re.M | re.S)
    assert "\\*bold\\*" in outside and "*bold*" not in outside.replace("\\*", "")
    assert "Speed-up by technique" in text and "What failed" in text


def test_the_markdown_says_what_the_signs_of_techniques_mean() -> None:
    text = page.render_markdown(compare_arms(levels(), None))
    legend = "|\n\n● engaged, with evidence from the run; ○ requested, and not engaged; – not "
    assert text.count(legend) == 1 and text.index("○ skipped 1 |") < text.index(legend)


def test_a_disk_that_takes_nothing_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert page.write_comparison(compare_arms(levels(), None), tmp_path / "file") == []
    warned = {
        record.getMessage().split(" is not")[0].rpartition("/")[2] for record in caplog.records
    }
    assert {"comparison.json", "comparison.html"} <= warned
    assert (tmp_path / "file").read_text() == ""


def test_what_could_not_be_measured_is_left_open_everywhere(tmp_path: Path) -> None:
    few = arm("few", 1.5, "", speedup_interval=(0.0, math.inf), losses=[math.nan, 2.0, 1.0])
    found = compared(few, arm("odd", math.nan, "", speedup_interval=None, losses=[]))
    page.write_comparison(found, tmp_path)
    assert texts(found)[0] == "No arm is measurably faster than none."
    for name in ("comparison.html", "comparison.md", "comparison.json"):
        text = (tmp_path / name).read_text()
        assert not re.search(r"\b(nan|NaN|inf|Infinity)\b", text), name
    assert "too few blocks" in (tmp_path / "comparison.md").read_text()


def test_a_curve_keeps_its_spikes_and_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    steps = [*range(1, 2001), *range(1500, 3001)]
    lines: list[dict[str, Any]] = [
        {"step": s, "split": "train", "loss": 99.0 if s == 777 else 3 - s / 1000} for s in steps
    ]
    lines.append({"step": 3001, "split": "train", "loss": None})
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\nnot json "train"\n')
    curve = read_curves(tmp_path)["train/loss"]
    assert [step for step, _ in curve] == list(range(1, 3001))
    thinned = downsample_curve(curve, 100)
    assert len(thinned) <= 100 and (777.0, 99.0) in thinned and thinned == sorted(thinned)


# on a terminal


def shown(comparison: Comparison, width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, file=out, force_terminal=False).print(
        ComparisonScreen(comparison), crop=False
    )
    return out.getvalue()


def test_eighty_columns_hold_the_most_telling_and_more_hold_when_compiling_is_paid_back() -> None:
    for width, parts in (
        (80, ("1.83×", "1.79–1.87", "0.699", "91,500", "500 MiB", "bf16", "faster")),
        (120, ("11.8 s", "21,400")),
    ):
        text = shown(compare_arms(levels(), None), width)
        assert max(map(len, text.splitlines())) <= width
        rows = {line.split(" ")[0]: line for line in text.splitlines()}
        assert [part for part in parts if part not in rows["advanced"]] == []
        assert {"none", "basic", "ultra"} <= rows.keys()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_width_loses_a_name_or_a_row(width: int) -> None:
    long = "optimization=ultra model.width=1024 training.batch_size=2048"
    found = compared(arm(long, 1.5), failed("gone", "oom", "too big"))
    squeezed = "".join(shown(found, width).split())
    for part in ("model.width=1024", "batch_size=2048", "oom", "toobig"):
        assert part in squeezed


def test_failures_are_listed_once_with_their_reason_and_of_many_rows_the_first_ones() -> None:
    gone = [failed(f"arm{i}", "killed", "by signal 9") for i in range(3)]
    text = shown(compared(*gone, failed("big", "oom", "2 GiB")), 120)
    assert text.count("arm0, arm1 and arm2 killed: by signal 9") == text.count("by signal 9") == 1
    assert "big oom: 2 GiB" in text
    many = shown(compared(*(arm(f"arm{i}", 1.1) for i in range(99))))
    assert "arm58 " in many and "arm59 " not in many
    assert "and 40 more, in comparison.html and comparison.json" in many


def test_a_sweep_over_what_is_learned_keeps_the_metric_and_lets_memory_go(tmp_path: Path) -> None:
    busy = Throughput(20_000.0, None, StepTime(1.6, 2.0), other_cpu_share=0.25)
    for name, lr, best in (("adamw", "1e-3", 0.2), ("sgd", "1e-2", 0.3)):
        typed = [f"optimizer={name}", f"optimizer.lr={lr}"]
        run(tmp_path / name, typed, best=best, throughput=busy)
    text = shown(compare_folders([tmp_path]))
    assert "val/accuracy (best)" in text and "0.3000" in text and "500 MiB" not in text


def test_a_heading_names_the_metric_once_and_the_checkpoint_that_it_is_of(tmp_path: Path) -> None:
    metrics = {"val/accuracy": 0.8, "val/loss": 0.3, "test/loss": 0.4}
    trained = {"metrics": metrics, "best_step": 40, "tested": {"step": 40, "samples": 9}}
    run(tmp_path / "a", ["seed=1"], **trained)
    run(tmp_path / "b", ["seed=2"], **trained)

    def headings(*more: str) -> list[str]:
        compared = compare_folders([tmp_path / name for name in ("a", "b", *more)])
        return [column.title for column in select_columns(compared) if "/" in column.title[:5]]

    of_two = ["val/accuracy (best)", "val/loss (last)", "test/loss (best)"]
    assert headings() == of_two
    run(tmp_path / "c", ["seed=3"], **{**trained, "best_step": 50})  # its best could not be read
    run(tmp_path / "d", ["job=evaluate"], job="evaluate", metrics={"val/loss": 0.3})
    assert headings("c") == [*of_two[:2], "test/loss (best/last)"]
    assert headings("d") == [of_two[0], "val/loss (evaluated/last)", of_two[2]]


def test_an_arm_says_what_a_run_of_the_typed_length_engages_and_when_compiling_is_paid_back() -> (
    None
):
    short = "run too short (900 steps; tried from 970,000 on)"
    planned = {"fused_optimizer": "engaged", "amp": "tried", "compile": short, "tf32": "no TF32"}
    fast = arm(
        "ultra", 1.8, techniques=[technique("compile"), technique("tf32", "skipped")],
        planned=planned, compile_seconds=30.0, break_even_steps=1350,
    )  # fmt: skip
    never = arm("advanced", 0.5, "slower", compile_seconds=30.0)
    found = " ".join(shown(compared(reference(), fast, never)).split())
    assert "ultra: a run of this length engages fused optimizer; measures, and keeps" in found
    assert f"faster, amp; skips compile: {short};" in found and "TF32" not in found
    assert "30.0 s of compiling are paid back after 1,350 steps" in found
    assert "advanced: 30.0 s of compiling are not paid back." in found
    document = page.render_markdown(compared(reference(), fast, never))
    assert "add optimization.measure=false optimization.compile.min\\_steps=0" in document
    assert "min\\_steps=0" not in page.render_markdown(compared(reference(), never))


# the command


def test_the_command_compares_two_sweeps_into_a_folder_that_leads_to_the_runs(
    tmp_path: Path,
) -> None:
    for name, level in (("one", "none"), ("two", "ultra")):
        folder = sweep(tmp_path / name, [job(0, level)])
        run(folder / "0", [f"optimization={level}"], 2000.0 if name == "two" else 1000.0)
    both = ("-m", "runner.report", "one", "two", "--out", "x/both")
    done = runs.python(*both, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ultra" in done.stdout and "×" not in done.stdout and "tensorboard" in done.stdout
    out = tmp_path / "x/both"
    files = {path.name for path in out.iterdir()}
    assert {"comparison.json", "comparison.md", "comparison.html"} <= files
    for row in json.loads((out / "comparison.json").read_text())["rows"]:
        assert (out / row["folder"] / "summary.json").is_file()


def test_a_wrong_command_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    wrong = ([], ["nowhere"], ["a file"], ["."], ["--what"], ["--port=1", "."])
    for typed in (*wrong, ["--tensorboard", "nowhere"]):
        assert main(list(typed)) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "--out" in capsys.readouterr().out


def test_what_lies_in_the_current_folder_stands_in_for_no_package(tmp_path: Path) -> None:
    for name in ("rich", "hydra", "yaml", "omegaconf"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    search = f"{runs.TESTS.parent}:"  # and the current folder
    done = runs.python("-m", "runner.report", "nowhere", folder=tmp_path, PYTHONPATH=search)
    assert done.returncode == 2 and "cannot be read" in done.stderr


def with_skipped_steps(
    folder: Path, *overrides: str, skipped: int, best: float, spikes: int = 0
) -> None:
    faults = {"non_finite": skipped - spikes, "overflow": 2}
    more = {"skipped_steps": skipped + 2 * bool(skipped), "steps": 60, "faults": faults}
    run(folder, [*overrides], best=best, **more)


def test_skipped_steps_are_in_row_page_and_json_and_beside_the_name_of_the_best(
    tmp_path: Path,
) -> None:
    with_skipped_steps(tmp_path / "a", "optimizer.lr=0.1", skipped=31, best=0.9)
    with_skipped_steps(tmp_path / "b", "optimizer.lr=0.2", skipped=0, best=0.8)
    comparison = compare_folders([tmp_path])
    text = "31 of 60 steps skipped (non-finite)"
    assert any(f"0.9000 (lr=0.1, {text})" in told for told in texts(comparison))
    screen = " ".join(shown(comparison, 100).split())
    assert screen.count(text) == 2  # in the conclusion and in the row
    write_comparison(comparison, tmp_path)
    assert f"done, {text}" in (tmp_path / "comparison.html").read_text()
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["skipped_steps"] for row in rows] == [text, ""]


def test_a_configuration_has_the_skipped_steps_of_all_its_runs(tmp_path: Path) -> None:
    for lr, skipped in ((0.1, 31), (0.2, 0)):
        for seed in (1, 2):
            typed = f"optimizer.lr={lr}", f"seed={seed}"
            folder, spikes = tmp_path / f"{lr}-{seed}", skipped and seed
            with_skipped_steps(folder, *typed, skipped=skipped, best=lr + seed, spikes=spikes)
    told = " ".join(texts(compare_folders([tmp_path])))
    assert "62 of 120 steps skipped (59 non-finite)" in told and told.count("skipped") == 1


def test_the_best_trial_of_a_search_is_named_with_its_skipped_steps() -> None:
    trials = [SearchTrial(0, "done", 0.9, folder="0"), SearchTrial(1, "done", 0.8, folder="1")]
    search = SearchRecord("val/accuracy", "maximize", "tpe", "none", 2, "", [], trials)
    summary = {"steps": 60, "skipped_steps": 31}
    rows = [ComparisonRow([], "done", summary=summary, name=n, folder=n) for n in ("0", "1")]
    told = conclusion(Comparison("s", rows, search=search))[0].text
    assert told.startswith("Best val/accuracy: 0.9000, trial 0 of 2, 31 of 60 steps skipped")


def test_long_names_reasons_and_values_are_shortened_on_page_and_screen(tmp_path: Path) -> None:
    long = "y" * 300_000
    for name in "ab":
        overrides, reason = [f"model.name={long[:3000]}{name}"], f"ValueError: {long}"
        run(tmp_path / name, overrides, status="failed", reason=reason)
    comparison = compare_folders([tmp_path])
    assert len({row.name for row in comparison.rows}) == 2
    assert all(len(row.name) < 400 for row in comparison.rows)
    write_comparison(comparison, tmp_path)
    for name in ("comparison.html", "comparison.md"):
        assert len((tmp_path / name).read_text()) < 200_000
    assert len(shown(comparison, 100)) < 10_000
