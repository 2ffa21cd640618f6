"""User code that ends the process, or leaves threads and processes behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from runner.core.record.summary import Summary
from runner.scale.distributed.outcome import RankEnd, RankOutcome, judge
from tests.runs import QUICK, command
from tests.scale.sweep.test_sweep_ends import child_of, end_of

CODE = """
import os, sys, threading, time
import torch
from runner import Hook

def leave(how):
    if how == "none": sys.exit()
    if how == "text": raise SystemExit("text")
    if how == "os": os._exit(0)
    if how == "zero": sys.exit(0)

def upload(seconds):
    threading.main_thread().join()
    time.sleep(seconds)

class Net(torch.nn.Module):
    def __init__(self, in_features, classes, how="", at=8, thread_s=0.0, process_s=0):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(in_features, classes), 0
        self.how, self.at = how, at
        if thread_s:
            threading.Thread(target=upload, args=[thread_s], name="uploader").start()
        if process_s and os.fork() == 0:
            os.setsid()
            time.sleep(process_s)
            os._exit(0)
    def forward(self, x):
        self.calls += self.training
        if self.calls == self.at: leave(self.how)
        return self.layer(x.flatten(1))

class Data:
    sizes = {"task": "classification", "in_features": 6, "classes": 2}
    def __init__(self, how=""): self.how = how
    def __len__(self): return 60
    def __getitem__(self, index):
        if index == 50: leave(self.how)
        return torch.randn(6), index % 2

class Ending(Hook):
    def __init__(self, how=""): self.how = how
    def on_step(self, run, step):
        if run.progress.step == 8: leave(self.how)
"""
SHORT = (*QUICK, "data=cancer", "training.steps=12", "security.trusted=[own]")
NET = ("model._target_=own.Net",)
DATA = ("data._target_=own.Data", *NET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(CODE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("how", "says", "typed"),
    [
        ("none", "sys.exit(None)", (*NET, "+model.how=none")),
        ("text", "sys.exit('text')", ("+debug.hooks=[{_target_: own.Ending, how: text}]",)),
        ("zero", "sys.exit(0)", (*DATA, "+data.how=zero", "data.workers=1")),
        ("zero", "sys.exit(0)", (*DATA, "+data.how=zero", "data.workers=0")),
    ],
)
def test_sys_exit_in_user_code_is_exit_code_1_and_one_line_with_its_place(
    folder: Path, how: str, says: str, typed: tuple[str, ...]
) -> None:
    typed = tuple(t for t in SHORT if not (t == "data=cancer" and "own.Data" in str(typed))) + typed
    done = command(folder, *typed, "hydra.run.dir=outputs/r")
    line = line_of(f'how == "{how}"')
    text = f"user code called {says} ({folder}/own.py:{line})"
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "error: " in last and text in last
    summary = Summary.read(folder / "outputs/r")
    assert summary.status == "failed" and text in summary.reason


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_job_without_a_summary_is_done_if_it_reports_its_end(start: str, folder: Path) -> None:
    np.save(folder / "weights.npy", np.zeros(3))
    typed = ("job=scan", "scan.path=weights.npy", "seed=1,2", f"sweep.start={start}")
    done = command(folder, "-m", *typed, "hydra.sweep.dir=outputs/s")
    jobs = json.loads((folder / "outputs/s/sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "done"] and done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_sweep_keeps_where_user_code_called_sys_exit(folder: Path) -> None:
    done = command(folder, "-m", *SHORT, *NET, "+model.how=zero,fine", "hydra.sweep.dir=outputs/s")
    jobs = json.loads((folder / "outputs/s/sweep.json").read_text())["jobs"]
    assert done.returncode == 7 and [job["status"] for job in jobs] == ["failed", "done"]
    assert f"sys.exit(0) ({folder}/own.py:" in jobs[0]["reason"]


def test_a_process_of_a_run_that_ends_with_code_0_before_its_outcome_is_lost() -> None:
    done, running = (RankOutcome(rank, kind) for rank, kind in enumerate(("done", "running")))
    ends = [RankEnd(0, "process 0", 0, outcome=done), RankEnd(1, "process 1", 0, outcome=running)]
    verdict = judge(ends)
    assert (verdict.kind, verdict.exit_code) == ("lost", 1)
    assert verdict.message == "process 1 ended with exit code 0 during the run"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("os", "exit code 0 during"), ("none", "own.py:")])
def test_processes_of_a_run_that_user_code_ends_are_no_success(
    folder: Path, how: str, says: str
) -> None:
    typed = ("distributed=ddp", "distributed.processes=2", "distributed.timeout_s=20")
    done = command(folder, *SHORT, *NET, f"+model.how={how}", *typed, "hydra.run.dir=outputs/r")
    assert done.returncode == 1 and says in done.stderr.splitlines()[-1]


def test_a_run_that_waits_for_a_thread_of_user_code_says_that_it_is_done(folder: Path) -> None:
    done = command(folder, *SHORT, *NET, "+model.thread_s=4", "hydra.run.dir=outputs/r")
    assert done.returncode == 0 and Summary.read(folder / "outputs/r").status == "done"
    place = f"thread uploader ({folder}/own.py:{line_of('time.sleep(seconds)')})"
    last = done.stderr.splitlines()[-1]
    assert last == f"done; this process waits for what user code has started: {place}"


def test_a_job_whose_record_is_complete_is_done_however_its_process_ends(tmp_path: Path) -> None:
    code = "from pathlib import Path; from runner.core.record.summary import Summary; "
    code += f"Summary('done').write(Path({str(tmp_path)!r})); import time; time.sleep(60)"
    process = child_of(tmp_path, code, writes_summary=True)
    while not (tmp_path / "summary.json").exists():
        time.sleep(0.02)
    process.timeout_s = 0.0
    while not process.has_ended():
        time.sleep(0.02)
    assert process.requested_status == "timeout" and end_of(process) == ("done", "")


@pytest.mark.slow
def test_a_process_that_user_code_leaves_behind_keeps_no_process_of_a_sweep_alive(
    folder: Path,
) -> None:
    typed = [*SHORT, *NET, "+model.process_s=600", "hydra.sweep.dir=outputs/s"]
    typed += ["seed=0,1", "sweep.benchmark_s=0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    command_line = [sys.executable, "-m", "runner", "-m", *typed]
    sweep = subprocess.Popen(command_line, cwd=folder, env=environment)
    ours = dict[int, psutil.Process]()
    while sweep.poll() is None:
        for child in psutil.Process(sweep.pid).children():
            ours[child.pid] = child
        time.sleep(0.05)
    left = [p for p in psutil.process_iter() if _works_in(p, folder) and p.pid not in ours]
    try:
        assert sweep.returncode == 0 and len(ours) >= 2 and left
        assert not psutil.wait_procs(list(ours.values()), 60)[1]
    finally:
        for process in left:
            process.kill()


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False


def test_a_working_folder_removed_at_the_end_leaves_a_finished_run_finished(folder: Path) -> None:
    code = "import shutil, os\nfrom runner import Hook\nclass Removes(Hook):\n"
    code += "    def on_step(self, run, step):\n"
    code += "        if run.progress.step == 12: shutil.rmtree(os.getcwd())\n"
    work = folder / "work"
    work.mkdir()
    (work / "own.py").write_text(code)
    typed = (*SHORT, "+debug.hooks=[{_target_: own.Removes}]", f"hydra.run.dir={folder}/r")
    done = command(work, *typed)
    assert done.returncode == 0, done.stderr
    assert Summary.read(folder / "r").status == "done" and (folder / "r/report.md").exists()
