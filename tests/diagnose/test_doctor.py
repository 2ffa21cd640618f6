"""job=doctor: the report, and each check given its input."""

import os
import resource
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runner.core.config.run_config import RunConfig
from runner.core.errors import NotVerified, StorageError
from runner.core.record.console import EscapingConsole
from runner.core.schemas.optimization import Optimization
from runner.core.techniques import compiler
from runner.diagnose import doctor
from runner.diagnose.doctor import (
    GIB,
    MIB,
    CheckStatus,
    DoctorCheck,
    DoctorReport,
    examine_machine,
    main,
    render_doctor_report,
)
from tests import runs


def config(*overrides: str) -> RunConfig:
    return runs.config("optimization=none", *overrides)


@pytest.fixture(scope="module")
def report() -> DoctorReport:
    return examine_machine(config("optimization.amp.enabled=true"))


def test_every_technique_has_a_row_and_this_environment_is_as_required(report):
    rows = {row.name: row for row in report.techniques}
    assert list(rows) == [name for name, _ in Optimization().techniques()]
    assert not rows["tf32"].available and "TF32" in rows["tf32"].reason
    assert rows["accumulation"].available and rows["accumulation"].reason == ""
    assert rows["amp"].requested and not rows["compile"].requested
    by_name = {check.name: check for check in report.checks}
    assert by_name["packages"].status is CheckStatus.ok, by_name["packages"].finding
    assert by_name["python"].status is CheckStatus.ok
    assert report.versions["torch"] == torch.__version__


def test_the_folder_gets_the_report_as_json_and_the_path_is_printed(tmp_path, capsys):
    report = main(config(), tmp_path)
    written = runs.read(tmp_path, "doctor.json")
    assert written["status"] == report.status.value
    assert written["device"]["kind"] == "cpu"
    assert {check["status"] for check in written["checks"]} <= {"ok", "warn", "fail"}
    out = capsys.readouterr().out
    assert str(tmp_path / "doctor.json") in out and "techniques" in out
    with pytest.raises(StorageError, match="doctor.json"):
        main(config(), tmp_path / "absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_failed_check_is_exit_code_1_after_the_report(tmp_path):
    with pytest.raises(NotVerified, match="^job=doctor: 1 check failed: device: ") as failed:
        main(config("device=cuda"), tmp_path)
    assert failed.value.exit_code == 1
    report = runs.read(tmp_path, "doctor.json")
    bad = [check for check in report["checks"] if check["status"] == "fail"]
    assert [check["name"] for check in bad] == ["device"]
    assert "built without CUDA" in bad[0]["finding"]
    assert report["status"] == "fail" and report["device"]["kind"] == "cpu"


def test_the_worst_check_is_the_status_and_text_in_brackets_is_shown_as_it_is(report):
    checks = [
        DoctorCheck("[red]name", CheckStatus.warn, "[/] found", "[bold]fix"),
        DoctorCheck("x", CheckStatus.ok, ""),
    ]
    report = replace(report, checks=checks)
    assert report.status is CheckStatus.warn
    console = EscapingConsole(width=80)
    with console.capture() as capture:
        console.print(render_doctor_report(report))
    lines = [line.strip() for line in capture.get().splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("[red]name"))
    assert "[/] found" in lines[at] and lines[at + 1] == "fix: [bold]fix"


def test_python_and_packages_are_compared_with_what_the_project_needs():
    supported = doctor.read_requirements()[1]
    versions = ((3, 11, 0), (3, 14, 0), (3, 10, 9))
    checks = [doctor.check_python(version, supported).status for version in versions]
    assert checks == [CheckStatus.ok, CheckStatus.fail, CheckStatus.fail]
    check = doctor.check_packages(["no-such-package-zz>=2", "numpy>=9999", "torch>=2.11"])
    assert check.status is CheckStatus.fail
    assert "numpy>=9999 is needed, found" in check.finding
    assert check.fix == "pip install 'no-such-package-zz>=2' 'numpy>=9999'"
    assert doctor.check_packages([]).status is CheckStatus.warn


VERSION = 'test "$1" = --version && echo 12.2 && exit 0\n'
COMPILES = 'echo 12.2\nfor last; do :; done\ntest $# -eq 1 || touch "$last"'


@pytest.mark.parametrize(
    ("script", "finding"),
    [
        (COMPILES, "c++: 12.2"),
        ("exit 3", "does not compile"),
        (f"{VERSION}echo cannot find cc1plus >&2; exit 1", "cc1plus"),
        (f"{VERSION}exit 0", "compile"),
    ],
)
def test_a_compiler_that_tells_its_version_but_compiles_nothing_is_no_compiler(
    tmp_path, script, finding
):
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "c++").chmod(0o755)
    check = next(iter(doctor.check_compilers("cpu", {"CXX": str(tmp_path / "c++")})))
    assert finding in check.finding and ("cc1plus" in check.finding) == (finding == "cc1plus")
    assert check.status is (CheckStatus.ok if script == COMPILES else CheckStatus.warn)
    absent = next(iter(doctor.check_compilers("cpu", {"PATH": str(tmp_path / "none")})))
    assert absent.status is CheckStatus.warn and "CXX" in absent.fix


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30), "loop/cache"])
def test_a_cache_folder_that_cannot_exist_is_a_warning(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    check = doctor.check_compile_cache({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)})
    assert check.status is CheckStatus.warn and "cannot be written" in check.finding


def test_the_compile_cache_that_is_checked_is_the_one_that_runs_use(tmp_path, monkeypatch):
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = doctor.check_compile_cache(os.environ)
    assert not any(tmp_path.iterdir())
    with ExitStack() as scope:
        compiler.prepare(scope)
        assert check.finding == os.environ[compiler.CACHE_VARIABLE]
    Path(check.finding).chmod(0o777)  # a run does not use code that others may have written
    assert doctor.check_compile_cache(os.environ).status is CheckStatus.warn
    (tmp_path / "file").write_text("")
    taken = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache")}
    check = doctor.check_compile_cache(taken)
    assert check.status is CheckStatus.warn and "TORCHINDUCTOR_CACHE_DIR" in check.fix


def test_an_outputs_folder_is_checked_but_not_made(tmp_path):
    outputs = tmp_path / "outputs"
    assert doctor.check_disk(outputs / "runs").finding.endswith(str(Path("outputs") / "runs"))
    assert not outputs.exists()
    outputs.write_text("a file")
    assert doctor.check_disk(outputs / "runs").status is CheckStatus.fail


def test_a_shortage_is_a_warning_with_a_fix(monkeypatch, report):
    names = {"shared memory", "memory", "open files", "load"}
    assert names <= {check.name for check in report.checks}
    monkeypatch.setattr(doctor.memory, "shared_memory_bytes", lambda: 64 * MIB)
    monkeypatch.setattr(doctor.memory, "available_bytes", lambda: GIB - 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.1, 0.0, 0.0))
    gpu = SimpleNamespace(kind="cuda", torch=torch.device("cuda"))
    short = list(doctor.check_limits(gpu))
    assert {check.name for check in short} == {*names, "GPU memory"}
    assert all(check.status is CheckStatus.warn and check.fix for check in short)
    monkeypatch.setattr(doctor.memory, "shared_memory_bytes", lambda: None)
    monkeypatch.setattr(doctor.memory, "available_bytes", lambda: GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 8 * GIB))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 0.0, 0.0))
    assert {(check.status, check.fix) for check in doctor.check_limits(gpu)} == {
        (CheckStatus.ok, "")
    }
