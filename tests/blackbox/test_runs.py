"""What a run leaves behind, how it is continued, and what the other jobs answer about it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.runs import command
from tests.test_docs import PAGES, README, typed_commands

from .conftest import OWN, only, read

STEPS = ["training.steps=24", "training.batch_size=16", "training.validate_every=8",
         "checkpoint.every=4", "checkpoint.keep=9", "schedule=cosine", "optimizer.ema=0.9",
         "optimization=basic"]  # fmt: skip
SUMMARY = {
    "status", "reason", "steps", "epochs", "metrics", "throughput", "memory", "techniques",
    "skipped_steps", "faults", "checkpoint", "device", "versions", "config_hash", "command",
}  # fmt: skip
TYPED = [*typed_commands(README, "bash"), *(typed for page in PAGES if page.stem != "cluster"
         for typed in typed_commands(page, "console"))]  # fmt: skip
NEEDS = ("…", ".path=", "my_", "=outputs/", "attribute=")  # run by test_docs.py and others


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run that was never stopped."""
    done = command(place, *OWN, *STEPS, "name=straight")
    assert done.returncode == 0, done.stderr
    return only(place, "outputs/runs/straight/*")


def test_the_files_of_a_runs_folder(run: Path) -> None:
    there = {path.name for path in run.iterdir()}
    assert {".hydra", "summary.json", "metrics.jsonl", "report.md", "checkpoints"} <= there
    assert list(run.glob("events.out.tfevents.*"))
    steps = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert steps[-1] == "step_00000024" and len(steps) >= 6
    last, best = run / "checkpoints" / "last", run / "checkpoints" / "best"
    assert last.resolve().name == steps[-1] and best.resolve().name in steps
    names = {path.name for path in last.iterdir()}
    assert names == {"model.safetensors", "state.pt", "preprocessing.json", "manifest.json"}


def test_the_keys_of_summary_json(run: Path) -> None:
    summary = read(run / "summary.json")
    assert summary.keys() >= SUMMARY
    assert (summary["status"], summary["steps"], summary["skipped_steps"]) == ("done", 24, 0)
    assert {"val/accuracy", "val/loss"} <= summary["metrics"].keys()
    throughput = summary["throughput"]
    assert throughput["samples_per_second"] > 0
    assert throughput["step_ms"].keys() >= {"p50", "p95"}
    assert throughput["split"].keys() >= {"data", "forward", "backward", "optimizer"}
    assert summary["memory"].keys() >= {"peak_process_bytes", "peak_device_bytes"}
    rows = {row["name"]: row for row in summary["techniques"]}
    assert rows.keys() >= {
        "tf32", "amp", "compile", "whole_step", "fused_optimizer", "attention", "channels_last",
        "recompute", "accumulation", "chunked_loss", "quantization", "cuda_graphs", "pipeline",
        "system",
    }  # fmt: skip
    fused = rows["fused_optimizer"]
    assert fused.keys() >= {"name", "requested", "engaged", "reason", "evidence"}
    assert fused["requested"] and fused["engaged"] and fused["evidence"]
    assert not rows["amp"]["requested"] and not rows["amp"]["engaged"]
    assert summary["checkpoint"]["last"] == "checkpoints/step_00000024"
    assert summary["command"].startswith("python -P -m runner ")
    assert "model._target_=own.Net" in summary["command"]


def test_metrics_jsonl_has_one_object_a_line_and_every_step_once(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row.keys() >= {"step", "split"} for row in rows)
    assert [row["step"] for row in rows if row["split"] == "val"] == [8, 16, 24]
    trained = [row for row in rows if row["split"] == "train"]
    assert trained and all("loss" in row for row in trained)


def test_a_killed_run_resumes_bit_identically(run: Path, place: Path) -> None:
    typed = [*OWN, *STEPS, "name=killed", "checkpoint.resume=auto", "data.workers=0"]
    killed = command(place, *typed, OWN_DIES_AT="300")  # of 24 x 16 samples and the validations
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = only(place, "outputs/runs/killed/*")
    assert read(folder / "summary.json")["status"] == "running"
    done = command(place, *typed)
    assert done.returncode == 0, done.stderr
    assert only(place, "outputs/runs/killed/*") == folder  # it went on in place
    choices = {row["key"]: row["reason"] for row in read(folder / "summary.json")["choices"]}
    assert "continues at step" in choices["checkpoint.resume"]
    for name in ("last", "best"):
        ours, theirs = (
            (one / "checkpoints" / name / "model.safetensors").read_bytes() for one in (folder, run)
        )
        assert ours == theirs, name
    summaries = [read(one / "summary.json")["metrics"] for one in (folder, run)]
    assert summaries[0] == summaries[1]


def test_a_run_that_is_never_finite_exits_with_4_and_a_replay_names_the_module(place: Path) -> None:
    done = command(place, *OWN, "+model.fault=log", "name=nan", "training.steps=60")
    assert done.returncode == 4, done.stderr
    folder = only(place, "outputs/runs/nan/*")
    summary = read(folder / "summary.json")
    assert summary["status"] == "failed" and summary["skipped_steps"] == summary["steps"] > 0
    assert summary["faults"]["non_finite"] > 0
    for name in ("history.json", "anomalies.json"):
        assert read(folder / "debug" / name), name
    assert list((folder / "debug" / "captures").glob("step_*"))
    done = command(place, "job=replay", f"replay.path={folder}", "security.trusted=[own]")
    assert done.returncode == 0, done.stderr
    assert "part (Log)" in done.stdout and "log" in done.stdout


@pytest.mark.parametrize("early", [False, True])
def test_code_that_sets_up_logging_and_signals_leaves_log_traceback_and_a_warning(
    place: Path, early: bool
) -> None:
    typed = [*OWN, *STEPS, f"name=intrusive{early}", f"+model.early={early}".lower()]
    failed = command(place, *typed, "model._target_=own.Intrusive", "optimization=none")
    log = (only(place, f"outputs/runs/intrusive{early}/*") / "run.log").read_text()
    for text in (log, failed.stderr):
        assert "other code has set up logging again" in text
        named = "SIGTERM: other code has replaced the handler by own.Intrusive.on_signal" in text
        assert named is not early
        assert "own fault" in text.splitlines()[-1]
    assert failed.returncode == 1 and "Traceback" in log and '("own fault")' in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [typed for typed in TYPED if not any(n in " ".join(typed) for n in NEEDS)],
    ids=" ".join,
)
def test_a_command_that_documents_only_show_ends_with_code_0(
    typed: list[str], tmp_path: Path
) -> None:
    shorter = ["benchmark.budget_s=5"] if "job=benchmark" in typed else ["training.steps=6"]
    if "model=gpt" in typed:
        shorter += ["model.width=32", "model.depth=1", "data.sequence=32"]
    typed = [word for word in typed if not word.startswith(("training.steps=", "training.epochs="))]
    done = command(tmp_path, *typed, *shorter, "device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr
