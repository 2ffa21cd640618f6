"""The end of a run: the table on the terminal, report.md and curves.svg, and summary.json."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from runner.core.errors import StorageError
from runner.core.findings import Choice
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.jobs import run_report as report
from runner.core.record.console import print_stdout
from runner.core.record.history import History
from runner.core.record.summary import CheckpointPaths, MemoryPeaks, StepTime, Summary, Throughput

NO_COMPILER = "no C++ compiler was found on the path; install g++"
SUMMARY = Summary(
    status="done",
    steps=1200,
    epochs=26.67,
    metrics={"val/loss": 0.0912, "val/accuracy": 0.9722, "val/top_5": 0.9972},
    throughput=Throughput(
        samples_per_second=41234.5,
        tokens_per_second=5277000.0,
        step_ms=StepTime(0.776, 1.21),
        split={"data": 0.05, "forward": 0.3, "backward": 0.4, "optimizer": 0.2, "other": 0.05},
    ),
    memory=MemoryPeaks(612 * 2**20, 3 * 2**30),
    techniques=[
        TechniqueStatus("tf32", False, False, "not requested"),
        TechniqueStatus("fused_optimizer", True, True, "AdamW runs in one kernel"),
        TechniqueStatus("compile", True, False, NO_COMPILER),
    ],
    skipped_steps=7,
    faults={"non_finite": 7, "metrics": 1, "rollback": 0},
    checkpoint=CheckpointPaths("checkpoints/step_00001200", "checkpoints/step_00000900"),
    device={"kind": "cpu", "name": "a processor"},
    versions={"torch": "2.13.0"},
    config_hash="abc123",
    command="python -m runner data=digits",
    name="digits_mlp",
    wall_seconds=75.0,
    choices=[Choice("data.workers", 0, "the data is in memory; workers would only copy it")],
    git={"commit": "f00", "branch": "main"},
    monitor="val/accuracy",
    best=0.975,
    best_step=900,
)


def shown(summary: Summary, folder: Path | None, width: int = 80, verbose: bool = False) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(report.RunSummaryTable(summary, folder, verbose))
    return console.file.getvalue()  # type: ignore[attr-defined]


MUST = [
    "digits_mlp", "done", "val/accuracy", "0.9722", "best 0.9750 at step 900", "1,200 steps",
    "1 min 15 s", "41,234 samples/s", "5,277,000 tokens/s", "0.776 ms median",
    "1.21 ms at the 95th percentile",
    "612 MiB", "3.00 GiB", "40% backward", "fused_optimizer", "engaged",
    "skipped: no C++ compiler", "skipped steps", "7 of 1,200", "non_finite",
    "step_00000900 (best)", "python -P -m runner.report --tensorboard outputs",
]  # fmt: skip


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_holds_what_one_wants_to_know_and_fits(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "runs" / "digits_mlp" / "2026-01-01_00-00-00-abc"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1").touch()
    text = shown(SUMMARY, folder, width)
    words = " ".join(text.split())
    assert width == 40 or [word for word in MUST if word not in words] == []
    table = text.partition("TensorBoard:")[0]  # a command is not folded
    assert "0.9722" in text and max(map(len, table.splitlines())) <= width
    assert "tf32" not in text and "rollback" not in text  # not requested; it happened no times
    assert "the data is in memory" not in text and "AdamW runs" not in text
    full = " ".join(shown(SUMMARY, folder, 200, verbose=True).split())
    assert "0: the data is in memory" in full and "AdamW runs in one kernel" in full


@pytest.mark.parametrize(
    ("epochs", "metrics", "words"),
    [
        (1.0, {"val/loss": 0.5}, "1,200 steps, 1 epoch in 1 min 15 s, validation included"),
        (0.0, {}, "1,200 steps in 1 min 15 s"),  # a stream that has not ended, and no validation
    ],
)
def test_the_steps_and_epochs_that_were_trained_are_named(
    epochs: float, metrics: dict[str, float], words: str
) -> None:
    text = shown(replace(SUMMARY, epochs=epochs, metrics=metrics, best=None), None, 120)
    (line,) = (line for line in text.splitlines() if line.split()[:1] == ["trained"])
    assert line.split(maxsplit=1)[1].rstrip() == words


def test_fp32_on_a_gpu_without_tf32_is_reported_to_differ_from_a_plain_loop() -> None:
    def words(tf32: bool, **device: object) -> str:
        settings = {"settings": {"tf32_matmul": tf32, "tf32_cudnn": tf32}}
        return " ".join(shown(replace(SUMMARY, device={**device, **settings}), None).split())

    ampere = {"kind": "cuda", "name": "a GPU", "capabilities": {"tf32": True}}
    assert "precision TF32 off; a plain loop convolves in TF32" in words(False, **ampere)
    assert "TF32" not in words(True, **ampere)
    assert "TF32" not in words(False, kind="cuda", capabilities={"tf32": False})


def test_engaged_techniques_come_first_and_a_line_names_those_that_never_ran(
    tmp_path: Path,
) -> None:
    rows = [
        TechniqueStatus("tf32", True, False, "no TF32 here", status="not applicable"),
        TechniqueStatus("amp", True, False, "casting costs more", status="skipped"),
        TechniqueStatus("channels_last", True, False, "no convolution", status="skipped"),
        TechniqueStatus("compile", True, False, "mode default failed", status="fell back"),
        TechniqueStatus("system", True, True, "", {"threads": 1}, status="engaged"),
    ]
    summary = replace(SUMMARY, techniques=rows)
    text = shown(summary, tmp_path, 120)
    lines = [line.split() for line in text.splitlines()]
    names = [line[0] for line in lines if line and line[0] in ("engaged", "compile", "not")]
    assert names == ["engaged", "compile", "not"] and ["engaged", "system"] in lines
    assert "tf32, amp, channels_last" in text and text.count("fell back") == 1
    document = report.render_report(summary, tmp_path)
    assert all(f"{row.status}: {row.reason}" in document for row in rows[:4])


def test_the_end_of_a_run_is_thirty_lines_and_in_a_pipe_neither_folded_nor_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    metrics = {**SUMMARY.metrics, **{f"val/metric_{i}": 0.5 for i in range(12)}}
    summary = replace(SUMMARY, metrics=metrics, faults={}, skipped_steps=0)
    print_stdout(report.RunSummaryTable(summary, tmp_path), fold=False, crop=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30 and all(line == line.rstrip() for line in lines)
    (listed,) = [line for line in lines if line.startswith("  at the end ")]
    assert len(listed) > 200 and listed.count(", ") == len(metrics) - 2


def test_one_folder_that_is_best_and_last_is_named_once_and_large_metrics_are_plain(
    tmp_path: Path,
) -> None:
    path = "checkpoints/step_00001200"
    metrics = {"val/accuracy": 0.9722, "val/loss": 5.179e7, "val/mae": 123456.7, "val/low": 2e-5}
    summary = replace(SUMMARY, checkpoint=CheckpointPaths(path, path), metrics=metrics)
    text = shown(summary, tmp_path, 160)
    assert "step_00001200 (best, last)" in text and text.count("step_00001200") == 1
    assert "loss 51,790,000, mae 123,457, low 2e-05" in text
    assert "5% other (hooks, record)" in text


def test_a_run_that_failed_ends_without_figures_of_its_few_steps(tmp_path: Path) -> None:
    failed = replace(SUMMARY, status="failed")
    text, document = shown(failed, tmp_path), report.render_report(failed, tmp_path)
    for figure in ("41,234 samples/s", "backward", "0.776 ms median", "engaged", "the data is in"):
        assert figure not in text and figure in document
    for useful in ("digits_mlp", "failed", "non_finite", "step_00000900 (best)"):
        assert useful in text
    never = Summary(status="failed", reason="DataError: no sample", monitor="val/loss")
    assert "DataError: no sample" in shown(never, None)
    assert report.render_report(Summary()).startswith("# run")


def test_the_document_has_the_classes_the_reasons_and_the_origin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classes = {"val/accuracy/cat": 0.25, "val/accuracy/dog": 0.5, "val/accuracy/a/b": 0.75}
    summary = replace(SUMMARY, metrics=SUMMARY.metrics | classes)
    short = shown(summary, None)
    assert "0.2500 (class cat) to 0.7500 (class a/b)" in short and "dog" not in short
    report.write_report(summary, tmp_path)
    assert not (tmp_path / "curves.svg").exists()  # there is no record
    text = (tmp_path / "report.md").read_text()
    words = ["0.9722", "best 0.9750", "skipped", "f00 on main", "2.13.0", "val/accuracy/dog"]
    words += ["workers would only copy it", "```sh\npython -m runner data=digits\n```"]
    assert [word for word in words if word not in text] == []
    report.write_report(SUMMARY, tmp_path / "nowhere")
    assert "report.md is not written" in caplog.text


def test_the_curves_are_drawn_beside_the_report_and_hold_what_the_record_does(
    tmp_path: Path,
) -> None:
    rows = [{"step": i, "split": "train", "loss": 2.0 / i} for i in range(1, 301)]
    rows += [{"step": 100, "split": "val", "loss": 1.0, "accuracy": 0.5}]
    rows += [{"step": 300, "split": "val", "loss": 0.5, "accuracy": 1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), "{torn", ""]))
    report.write_report(SUMMARY, tmp_path)
    assert "](curves.svg)" in (tmp_path / "report.md").read_text()
    drawn = ElementTree.parse(tmp_path / "curves.svg").getroot()  # noqa: S314  # it is ours
    space = "{http://www.w3.org/2000/svg}"
    names = [x.text for x in drawn.iter(f"{space}tspan")]
    assert names == ["train/loss", "val/loss", "val/accuracy"]
    points = [x.attrib["points"].split() for x in drawn.iter(f"{space}polyline")]
    assert 100 < len(points[0]) <= 240 and [len(x) for x in points[1:]] == [2, 2]
    heights = [float(point.split(",")[1]) for point in points[2]]
    assert heights[0] > heights[1]  # an accuracy that rises goes up


def test_it_says_what_went_wrong_when_what_was_done_and_how_to_look_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "runs" / "x"
    (run / "debug" / "captures" / "step_00000043").mkdir(parents=True)
    (run / "debug" / "profile.md").touch()
    faults = History(run)
    for step in range(43, 50):
        faults.add(
            "non_finite", "the loss was nan", step=step, category="numerics", say=False,
            action="skipped" if step < 49 else "rolling back",
            capture="debug/captures/step_00000043" if step == 43 else "",
        )  # fmt: skip
    faults.write()
    text = " ".join(shown(SUMMARY, run).split())
    assert "7, steps 43, 44, 45, 46, …: the loss was nan; skipped (6); rolling back (1)" in text
    command = "runner job=replay replay.path=outputs/runs/x/debug/captures/step_00000043"
    assert [x for x in shown(SUMMARY, run, 120).splitlines() if command in x]  # whole, to be copied
    assert "history.json, profile.md, captures/ (1)" in text
    page = report.render_report(SUMMARY, run)
    assert "| non\\_finite | warning | 6 | steps 43, 44, 45, 46, … | the loss was nan |" in page
    assert "replay.path=" in page


def test_counts_of_one_are_singular_classes_are_named_and_a_written_file_has_a_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "predictions" / ("x" * 60)
    check = {"ok": False, "faults": 1, "warnings": 2, "worst": [{"evidence": "1 NaN of 1 value"}]}
    classes = {"val/accuracy/3": 0.0, "val/accuracy/0": 0.9444}
    summary = replace(SUMMARY, job="predict", steps=1, model_check=check)
    summary = replace(summary, metrics={"val/accuracy": 0.5, **classes})
    summary = replace(summary, export={"file": "predictions.csv", "rows": 1, "bytes": 50})
    text = shown(summary, folder, 120)
    assert "1 fault, 2 warnings; 1 NaN of 1 value" in text
    assert "0 (class 3) to 0.9444 (class 0)" in text
    assert "predictions.csv (1 row, 50 bytes)" in text
    path = f"outputs/predictions/{'x' * 60}/predictions.csv"
    lines = shown(summary, folder, 120).splitlines()
    assert f"written to:    {path}" in lines  # whole, to be copied


def test_a_summary_reads_back_as_it_was_written_but_for_inf(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path)
    assert Summary.read(tmp_path) == SUMMARY
    replace(SUMMARY, metrics={"val/loss": math.inf}).write(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"] == {"val/loss": None}
    assert math.isnan(Summary.read(tmp_path).metrics["val/loss"])
    for damaged in ("", "[]", '{"techniques": [{"name": "x"}]}', '{"metrics": 3}'):
        (tmp_path / "summary.json").write_text(damaged)
        with pytest.raises(StorageError, match="no readable summary"):
            Summary.read(tmp_path)
