from __future__ import annotations

import json
import os
import resource
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from runner.device.config import DeviceConfig, DeviceKind
from runner.doctor import environment, packages
from runner.doctor.environment import GIB, MIB, Check, Status
from runner.errors import StorageError
from runner.jobs.doctor import Report, examine, main, show
from runner.techniques import compiler
from runner.techniques.config import Optimization


@dataclass
class Config:
    """The two parts of a config that the doctor reads."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    optimization: Optimization = field(default_factory=Optimization)


@pytest.fixture(scope="module")
def report() -> Report:
    return examine(Config(DeviceConfig(kind=DeviceKind.cpu)))


def printed(report: Report) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(show(report))
    return capture.get()


def test_every_technique_has_a_row_with_a_reason_where_it_cannot_be_had(report):
    rows = {row.name: row for row in report.techniques}
    assert list(rows) == [name for name, _ in Optimization().techniques()]
    assert not rows["tf32"].available and "TF32" in rows["tf32"].reason
    assert rows["accumulation"].available and rows["accumulation"].reason == ""


def test_a_technique_asked_for_is_shown_as_that():
    config = Config(DeviceConfig(kind=DeviceKind.cpu))
    config.optimization.amp.enabled = True
    rows = {row.name: row.requested for row in examine(config).techniques}
    assert rows["amp"] and not rows["compile"]


def test_this_environment_meets_the_projects_requirements(report):
    by_name = {check.name: check for check in report.checks}
    assert by_name["packages"].status is Status.ok, by_name["packages"].found
    assert by_name["python"].status is Status.ok
    assert report.versions["torch"] == torch.__version__


def test_the_folder_gets_the_report_as_json_and_the_path_is_printed(tmp_path, capsys):
    report = main(Config(DeviceConfig(kind=DeviceKind.cpu)), tmp_path)
    path = tmp_path / "doctor.json"
    written = json.loads(path.read_text())
    assert written["status"] == report.status.value
    assert written["device"]["kind"] == "cpu"
    assert {check["status"] for check in written["checks"]} <= {"ok", "warn", "fail"}
    out = capsys.readouterr().out
    assert str(path) in out and "techniques" in out


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path, capsys):
    with pytest.raises(StorageError, match="doctor.json"):
        main(Config(), tmp_path / "absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_an_absent_device_is_a_failed_check_and_the_rest_is_still_told():
    report = examine(Config(DeviceConfig(kind=DeviceKind.cuda)))
    failed = [check for check in report.checks if check.status is Status.fail]
    assert [check.name for check in failed] == ["device"]
    assert "built without CUDA" in failed[0].found
    assert report.status is Status.fail and report.device["kind"] == "cpu"
    assert "fail" in printed(report)


def test_the_worst_check_is_the_status(report):
    def status(*found: Status) -> Status:
        return replace(report, checks=[Check("x", one, "") for one in found]).status

    assert status(Status.ok, Status.warn) is Status.warn
    assert status(Status.warn, Status.fail, Status.ok) is Status.fail
    assert status(Status.ok) is Status.ok


def test_a_fix_is_on_a_line_of_its_own(report):
    shown = replace(report, checks=[Check("load", Status.warn, "load 9.0", "wait")])
    console = Console(width=80)
    with console.capture() as capture:
        console.print(show(shown))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    at = next(i for i, line in enumerate(lines) if "load 9.0" in line)
    assert lines[at + 1].strip() == "fix: wait"


def test_text_in_brackets_is_shown_as_it_is(report):
    odd = replace(report, checks=[Check("[red]name", Status.warn, "[/] found", "[bold]fix")])
    out = printed(odd)
    assert "[red]name" in out and "[/] found" in out and "fix: [bold]fix" in out


# each check, given what it judges


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 11, 0), Status.ok), ((3, 14, 0), Status.fail), ((3, 10, 9), Status.fail)],
)
def test_python_is_held_against_the_projects_range(version, status):
    assert environment.python(version, packages.declared()[1]).status is status


def test_a_missing_and_a_too_old_package_are_named_with_who_needs_them():
    unmet = packages.unmet(["no-such-package-zz>=2", "numpy>=9999", "torch>=2.11"])
    assert [(one.requirement, one.found is None) for one in unmet] == [
        ("no-such-package-zz>=2", True),
        ("numpy>=9999", False),
    ]
    check = environment.requirements_met(["…"], unmet)
    assert check.status is Status.fail
    assert "runner needs numpy>=9999, found" in check.found
    assert check.fix == "pip install 'no-such-package-zz>=2' 'numpy>=9999'"


def test_requirements_that_cannot_be_found_are_no_all_clear():
    assert environment.requirements_met([], []).status is Status.warn


def test_what_a_package_needs_in_turn_is_looked_at(tmp_path, monkeypatch):
    info = tmp_path / "outer_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outer-pkg\nVersion: 1.0\n"
        "Requires-Dist: numpy<1\n"
        "Requires-Dist: no-such-package-zz; extra == 'more'\n"
        "Requires-Dist: no-such-package-zz; python_version < '3'\n"
        "Requires-Dist: outer-pkg\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [(one.requirement, one.needed_by) for one in packages.unmet(["outer-pkg"])] == [
        ("numpy<1", "outer-pkg")
    ]
    with_extra = packages.unmet(["outer-pkg[more]"])
    assert [one.requirement for one in with_extra] == ["no-such-package-zz", "numpy<1"]


def test_a_hydra_with_known_bypasses_fails():
    assert environment.hydra("1.3.2").status is Status.fail
    assert environment.hydra("1.3.8").status is Status.ok


def test_the_compiler_named_in_cxx_is_the_one_that_is_asked(tmp_path):
    works, broken = tmp_path / "works", tmp_path / "broken"
    works.write_text("#!/bin/sh\necho my compiler 1.2\n")
    broken.write_text("#!/bin/sh\nexit 3\n")
    for script in (works, broken):
        script.chmod(0o755)
    first = next(iter(environment.compilers("cpu", {"CXX": str(works)})))
    assert first.status is Status.ok and first.found == f"{works}: my compiler 1.2"
    second = next(iter(environment.compilers("cpu", {"CXX": str(broken)})))
    assert second.status is Status.warn and "does not run" in second.found


def test_no_compiler_is_a_warning_with_the_fix(tmp_path):
    check = next(iter(environment.compilers("cpu", {"PATH": str(tmp_path)})))
    assert check.status is Status.warn and "CXX" in check.fix


def test_triton_is_looked_for_on_a_gpu_only(tmp_path):
    environ = {"PATH": str(tmp_path)}
    assert "triton" not in {check.name for check in environment.compilers("cpu", environ)}
    assert "triton" in {check.name for check in environment.compilers("cuda", environ)}


def test_a_compile_cache_that_cannot_be_written_is_a_warning(tmp_path):
    fine = environment.inductor_cache({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a" / "b")})
    assert fine.status is Status.ok and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    taken = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache")}
    check = environment.inductor_cache(taken)
    assert check.status is Status.warn and "TORCHINDUCTOR_CACHE_DIR" in check.fix


def test_the_compile_cache_that_is_checked_is_the_one_that_runs_use(tmp_path, monkeypatch):
    monkeypatch.delenv(compiler.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = environment.inductor_cache(os.environ)
    assert not any(tmp_path.iterdir())
    with ExitStack() as scope:
        compiler.prepare(scope)
        assert check.found == os.environ[compiler.CACHE]
    Path(check.found).chmod(0o777)  # a run does not use code that others may have written
    assert environment.inductor_cache(os.environ).status is Status.warn
    with ExitStack() as scope:
        compiler.prepare(scope)
        assert os.environ[compiler.CACHE] != check.found


def test_the_disk_check_reads_the_nearest_folder_that_is_there(tmp_path):
    check = environment.disk(tmp_path / "outputs" / "runs")
    assert check.found.endswith(str(Path("outputs") / "runs"))
    assert not (tmp_path / "outputs").exists()


def test_an_outputs_folder_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "outputs").write_text("a file")
    assert environment.disk(tmp_path / "outputs" / "runs").status is Status.fail


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (environment.shared_memory(64 * MIB), Status.warn),
        (environment.shared_memory(256 * MIB), Status.ok),
        (environment.shared_memory(None), Status.ok),
        (environment.available_memory(GIB - 1), Status.warn),
        (environment.available_memory(GIB), Status.ok),
        (environment.device_memory(3 * GIB, 8 * GIB), Status.warn),
        (environment.device_memory(7 * GIB, 8 * GIB), Status.ok),
        (environment.open_files(256), Status.warn),
        (environment.open_files(4096), Status.ok),
        (environment.open_files(resource.RLIM_INFINITY), Status.ok),
        (environment.load(4.0, 4, {}), Status.ok),
        (environment.load(9.0, 4, {}), Status.warn),
    ],
)
def test_a_check_that_is_not_ok_brings_a_fix(check, status):
    assert check.status is status
    assert (check.fix == "") is (status is Status.ok)


def test_a_busy_machine_with_passive_waiting_is_not_told_to_set_it():
    spinning = environment.load(9.0, 4, {})
    passive = environment.load(9.0, 4, {"OMP_WAIT_POLICY": "PASSIVE"})
    assert "OMP_WAIT_POLICY=passive" in spinning.fix
    assert "OMP_WAIT_POLICY" not in passive.fix
