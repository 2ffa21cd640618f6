"""scripts/prove_gpu.py without a GPU: schedule, record and exit codes; its checks on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from runner.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
QUICK = ("doctor", "gpu_tests", "resume", "sweep")  # checks of each kind
sys.path.insert(0, str(SCRIPTS))
try:
    import prove_gpu
    from gpu_checks import commands, speed, training
    from gpu_checks.base import Check, CheckFailed, Command, Workplace
    from gpu_checks.table import CHECKS
finally:
    sys.path[:] = [path for path in sys.path if path != str(SCRIPTS)]

if TYPE_CHECKING:
    Records = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class CodeCheck(Check):
    """A check that runs a piece of Python in its folder, with `note(text)` for a shared file."""

    code: str = ""

    def argv(self, device: str, folder: Path) -> list[str]:
        head = (
            "import json, os, subprocess, sys, time; from pathlib import Path\n"
            f"folder, name = Path({str(folder)!r}), {self.name!r}\n"
            "def note(text):\n"
            "    with (folder / 'notes').open('a') as file: file.write(f'{name} {text}\\n')\n"
            "def facts(**values):\n"
            "    (folder / name).mkdir(exist_ok=True)\n"
            "    (folder / name / 'facts.json').write_text(json.dumps(values))\n"
        )
        return [sys.executable, "-c", head + self.code]


def check(name: str, code: str, limit_s: float = 60.0, alone: bool = False) -> CodeCheck:
    return CodeCheck(name, "fake", limit_s, f"{name} holds", alone, code)


def prove(
    folder: Path,
    checks: list[CodeCheck],
    limit_s: float = 120.0,
    records: Records | None = None,
    write: Callable[[], None] = lambda: None,
) -> Records:
    records = {} if records is None else records
    deadline = time.monotonic() + limit_s
    prove_gpu.Prover(checks, "cpu", folder, deadline, records, write).run()
    return records


def verdicts(records: Records) -> dict[str, str]:
    return {name: record["verdict"] for name, record in records.items()}


# -- the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [one if one.name in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CHECKS],
    ids=lambda one: one.name,
)
def test_a_dry_run_prints_every_command_and_composes_every_config(
    one: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prove_gpu.dry_run([one], "cuda", tmp_path)
    printed = capsys.readouterr().out
    assert f"gpu_checks {one.name} --device=cuda" in printed
    lines, configs = one.shell_lines("cuda", tmp_path), one.configs("cuda", tmp_path)
    assert all(line in printed for line in lines)
    assert f"1 checks, {len(configs)} configs composed" in printed
    assert bool(configs) == bool(lines) == (one.name != "gpu_tests")  # no command of ours


def test_there_are_fourteen_checks_of_which_one_runs_alone() -> None:
    assert len({one.name for one in CHECKS}) == len(CHECKS) == 14
    assert [one.name for one in CHECKS if one.alone] == ["speed"]


def test_a_dry_run_refuses_a_key_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("gpu_checks.fake")
    vars(module)["MISTYPED"] = (Command("one", ("training.stepz=3",)),)
    monkeypatch.setitem(sys.modules, "gpu_checks.fake", module)
    with pytest.raises(ConfigError, match=r"training\.stepz"):
        prove_gpu.dry_run([Check("mistyped", "fake", 1.0, "")], "cuda", tmp_path)


def test_a_sweep_is_composed_job_by_job(tmp_path: Path) -> None:
    sweep = next(one for one in CHECKS if one.name == "sweep")
    seeds = [[o for o in job if o.startswith("seed=")] for job in sweep.configs("cpu", tmp_path)]
    assert seeds == [["seed=0"], ["seed=1"]]


def test_each_check_has_its_function() -> None:
    modules = {"commands": commands, "speed": speed, "training": training}
    assert all(callable(getattr(modules[one.module], one.name)) for one in CHECKS)


# -- the schedule ----------------------------------------------------------------------------------

TOGETHER = """
note("starts")
for _ in range(600):
    if len([x for x in (folder / "notes").read_text().splitlines() if "starts" in x]) >= 3: break
    time.sleep(0.05)
else: sys.exit("alone for 30 s")
note("ends")
"""
NOTED = "note('starts'); time.sleep(0.2); note('ends')"


def most_beside(folder: Path, name: str) -> int:
    """The largest number of checks that ran while `name` ran, itself included."""
    running: set[str] = set()
    most = 0
    for line in (folder / "notes").read_text().splitlines():
        who, event = line.split()
        (running.add if event == "starts" else running.discard)(who)
        if name in running:
            most = max(most, len(running))
    return most


def test_three_checks_run_side_by_side_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, start = 0, prove_gpu.Prover._start

    def counted(self: prove_gpu.Prover, one: Check) -> None:
        nonlocal most
        start(self, one)
        most = max(most, len(self.running))

    monkeypatch.setattr(prove_gpu.Prover, "_start", counted)
    checks = [check(f"c{i}", TOGETHER) for i in range(3)]
    checks += [check(f"c{i}", NOTED) for i in range(3, 6)]
    assert set(verdicts(prove(tmp_path, checks)).values()) == {"ok"}
    assert most == 3


def test_a_check_of_times_runs_alone(tmp_path: Path) -> None:
    names = ("a", "b", "timed", "c", "d")
    checks = [check(name, NOTED, alone=name == "timed") for name in names]
    assert set(verdicts(prove(tmp_path, checks)).values()) == {"ok"}
    assert most_beside(tmp_path, "timed") == 1


ORPHAN = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                         start_new_session=True)
facts(child=child.pid)
time.sleep(300)
"""


def test_a_check_beyond_its_time_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    records = prove(tmp_path, [check("slow", ORPHAN, limit_s=3.0), check("next", "")])
    assert verdicts(records) == {"slow": "failed", "next": "ok"}
    assert "it was ended after" in records["slow"]["facts"]["problem"]
    child = records["slow"]["facts"]["child"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_no_check_starts_or_continues_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_gpu, "RESERVE_S", 1.0)
    monkeypatch.setattr(prove_gpu, "LEAST_S", 0.5)
    sleeping = [check(f"c{i}", "time.sleep(10)") for i in range(5)]
    records = prove(tmp_path, sleeping, limit_s=3.0)
    names = [f"c{i}" for i in range(5)]
    assert verdicts(records) == dict.fromkeys(names[:3], "failed") | dict.fromkeys(
        names[3:], "not started"
    )


def test_an_interruption_ends_the_running_checks(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    checks = [check("long", ORPHAN), check("short", "time.sleep(2)")]
    with pytest.raises(KeyboardInterrupt):
        prove(tmp_path, checks, write=interrupt)
    child = json.loads((tmp_path / "long" / "facts.json").read_text())["child"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


# -- the record ------------------------------------------------------------------------------------


def test_verdict_facts_and_the_last_lines_of_output_are_recorded(tmp_path: Path) -> None:
    code = "facts(rate=3); print(*range(50), sep='\\n'); sys.exit({code})"
    checks = [check(f"exit{n}", code.format(code=n)) for n in (0, 1, 3, 70)]
    records = prove(tmp_path, checks)
    expected = {"exit0": "ok", "exit1": "failed", "exit3": "skipped", "exit70": "failed"}
    assert verdicts(records) == expected
    for record in records.values():
        assert list(record) == ["seconds", "verdict", "claim", "facts", "output"]
        assert record["facts"] == {"rate": 3}
        assert record["output"] == [str(n) for n in range(30, 50)]


def test_facts_of_an_earlier_call_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    prove(tmp_path, [check("one", "facts(old=1)")])
    assert prove(tmp_path, [check("one", "")])["one"]["facts"] == {}


def test_a_check_that_was_ok_is_not_repeated_and_others_are(tmp_path: Path) -> None:
    records: Records = {n: {"verdict": v} for n, v in (("a", "ok"), ("b", "failed"), ("c", "ok"))}
    records["d"] = {"verdict": "not started"}
    prove(tmp_path, [check(name, NOTED) for name in "abcd"], records=records)
    assert set((tmp_path / "notes").read_text().split()) == {"b", "d", "starts", "ends"}
    assert set(verdicts(records).values()) == {"ok"}


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["ok", "ok"], 0),
        (["ok", "skipped", "not started"], 0),
        (["ok", "failed"], 1),
        (["not started", "skipped"], 1),
        ([], 1),
    ],
)
def test_the_exit_code_is_0_only_if_all_checks_that_ran_hold(
    outcomes: list[str], code: int
) -> None:
    records = {str(i): {"verdict": outcome} for i, outcome in enumerate(outcomes)}
    assert prove_gpu.exit_code(records) == code


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine that says it has a GPU; its handler of SIGTERM is restored."""
    import signal

    before = signal.getsignal(signal.SIGTERM)
    facts = {"gpu": "a GPU", "driver": "1", "torch": "2"}
    monkeypatch.setattr(prove_gpu, "read_machine", lambda: facts)
    monkeypatch.setattr(prove_gpu, "FOLDER", tmp_path / "work")
    (tmp_path / "work").mkdir()
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def run_main(monkeypatch: pytest.MonkeyPatch, checks: list[CodeCheck], *typed: str) -> int:
    monkeypatch.setattr(prove_gpu, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["prove_gpu.py", *typed])
    return prove_gpu.main()


def test_the_file_is_whole_after_each_check_and_can_be_resumed(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, own_write, states = gpu_machine / "gpu.json", prove_gpu.write_json, []

    def write(path: Path, contents: dict[str, Any]) -> None:
        own_write(path, contents)
        states.append(verdicts(json.loads(out.read_text())["checks"]))

    monkeypatch.setattr(prove_gpu, "write_json", write)
    checks = [check("a", ""), check("b", "sys.exit(1)", alone=True)]
    assert run_main(monkeypatch, checks, f"--out={out}") == 1
    assert states == [{}, {"a": "ok"}, {"a": "ok", "b": "failed"}]
    written = json.loads(out.read_text())
    assert list(written) == ["machine", "limit_s", "seconds", "summary", "checks"]
    assert written["machine"]["gpu"] == "a GPU"
    assert written["summary"] == "1 ok, 1 failed, 0 skipped, 0 not started"

    checks = [check("a", "sys.exit(1)"), check("b", "")]
    assert run_main(monkeypatch, checks, f"--out={out}", f"--resume={out}") == 0
    assert verdicts(json.loads(out.read_text())["checks"]) == {"a": "ok", "b": "ok"}
    assert not list(gpu_machine.glob(".*.tmp"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPTS / "prove_gpu.py"), f"--out={out}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU: torch ") and "sees no CUDA device" in done.stderr
    assert not out.exists()


# -- the checks' own logic, on a CPU ---------------------------------------------------------------

FP32 = (*training.GUARDED, *training.VARIANTS["clip, ema, schedule"])


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_guarded_steps_leave_no_trace_of_the_bad_batch(optimizer: str) -> None:
    steps = training.make_guarded_steps("cpu", optimizer, FP32)
    assert training._guard_problems("", steps) == []
    assert steps.skipped == [number == training.BAD_STEP for number in range(1, 21)]
    distance, limit = training.compare_with_cpu(steps.weights, optimizer, FP32)
    assert distance == 0.0
    assert limit < {"AdamW": 1e-2, "Muon": 0.1}[optimizer]  # Muon computes in 16 bits


def test_a_guard_that_is_off_is_a_problem_of_the_guarded_steps() -> None:
    steps = training.make_guarded_steps("cpu", "AdamW", (*FP32, "stability.guard=false"))
    problems = training._guard_problems("case", steps)
    assert any("was not skipped" in text for text in problems)
    assert any("changed state" in text for text in problems)


def test_a_host_sync_is_a_problem_of_the_guarded_steps() -> None:
    steps = training.GuardedSteps([], False, [], [], sync_error="step 5: synchronizing")
    assert training._guard_problems("AdamW", steps) == ["AdamW: step 5: synchronizing"]


SPEED_OF = (
    *training.PLAIN, "optimization=none", "model=gpt", "model.width=16", "model.depth=1",
    "model.heads=1", "data=synthetic", "data.form=tokens", "data.sequence=8", "data.samples=80",
    "training.batch_size=8", "training.steps=20", "training.validate_every=5",
)  # fmt: skip


def test_the_wall_clock_counts_the_settled_steps_without_validations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with training.built("cpu", *SPEED_OF) as run:
        clock = speed.WallClock(run)
        now = 0.0

        def read() -> float:
            return now

        class Clock(training.Hook):
            def on_step(self, run: Any, step: Any) -> None:
                nonlocal now
                now += 1.0

            def on_validation(self, run: Any, evaluation: Any) -> None:
                nonlocal now
                now += 100.0

        monkeypatch.setattr(speed, "perf_counter", read)
        run.hooks.append(Clock())
        with clock.installed():
            training.train(run)
        assert (clock.steps, clock.samples, clock.seconds) == (17, 17 * 8, 17.0)
        assert "start" not in vars(run.stopwatch)  # the stopwatch is as before


def test_a_measured_speed_has_the_flops_of_forward_and_backward() -> None:
    result = speed.measure_speed("cpu", *SPEED_OF)
    with training.built("cpu", *SPEED_OF) as run:
        weights = sum(p.numel() for p in run.model.parameters())
    assert result.flops_per_sample == 8 * (6 * weights + 12 * 16 * 8)
    assert result.measured > 0 and result.reported > 0 and result.mfu is None


SPEEDS = {
    "none": {"reported": 10.0, "measured": 10.0, "error": 0.0, "mfu": 0.1},
    "advanced": {"reported": 40.0, "measured": 40.0, "error": 0.02, "mfu": 0.4},
    "ultra": {"reported": 60.0, "measured": 60.0, "error": -0.02, "mfu": 0.6},
}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"ultra": {"error": 0.98}}, "ultra: reports 60.0 samples/s"),
        ({"none": {"error": -0.031}}, "none: reports"),
        ({"ultra": {"measured": 49.0}}, "4.90 times as fast"),
        ({"ultra": {"mfu": 0.49}}, "MFU of ultra: 0.49"),
        ({"ultra": {"mfu": None}}, "MFU of ultra: None"),
        ({"none": {"error": float("nan")}}, "none: reports"),
    ],
)
def test_a_speed_that_is_wrong_or_too_low_is_a_problem(
    changed: dict[str, dict[str, Any]], problem: str | None
) -> None:
    facts = {name: {**values, **changed.get(name, {})} for name, values in SPEEDS.items()}
    problems = speed.speed_problems(facts)
    assert problems == [] if problem is None else len(problems) == 1 and problem in problems[0]


CROWDED = {
    "status": "done", "faults": {"out_of_memory": 2}, "micro_batch": 2048, "allocated": 100,
    "peak_reserved": 900, "limit": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"status": "failed"}, "ended as failed"),
        ({"faults": {}}, "never ran out of memory"),
        ({"micro_batch": 8192}, "its micro-batch is 8192"),
        ({"peak_reserved": 1001}, "it reserved 1,001"),
        ({"faults": {"out_of_memory": 1, "memory_cleaned": 20}}, "emptied 20 times"),
        ({"allocated": 112}, "memory stays behind"),
    ],
)
def test_a_run_that_handles_lack_of_memory_badly_is_a_problem(
    changed: dict[str, Any], problem: str | None
) -> None:
    fitting = {**CROWDED, "faults": {}}
    problems = training.memory_problems({**CROWDED, **changed}, fitting)
    assert problems == [] if problem is None else len(problems) == 1 and problem in problems[0]


def test_dropout_masks_differ_by_step_and_repeat_in_a_second_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager = ("optimization=none", "model.width=16", "model.depth=1", "data.sequence=8")
    cases = {"dropout": eager, "none": (*eager, "model.dropout=0.0")}
    results = {}
    for name, more in cases.items():
        monkeypatch.setattr(training, "DROPOUT", (*training.DROPOUT, *more))
        results[name] = training.compare_dropout("cpu")
    assert results["dropout"] == {"steps": 12, "distinct": 12, "repeats": True}
    assert results["none"]["distinct"] == 1  # nothing else changes the loss


def test_products_of_none_have_the_error_of_fp32() -> None:
    errors = training.product_errors("cpu")
    assert 0 < max(errors.values()) < training.FP32_ERROR / 3


def test_an_attention_kernel_is_known_by_part_of_its_name() -> None:
    names = {
        "flash": ["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"],
        "efficient": ["fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)"],
        "cudnn": ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"],
        "math": ["ampere_sgemm_32x32_sliced1x4_tn", "softmax_warp_forward"],
    }
    for name, own in names.items():
        assert training.has_expected_kernel(name, own)
    assert not training.has_expected_kernel("cudnn", names["flash"])
    assert not training.has_expected_kernel("math", names["efficient"])


def test_a_pickle_that_is_cut_is_not_read_as_a_whole_one(tmp_path: Path) -> None:
    import pickle

    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"segments": list(range(100))}))
    assert commands.count_opcodes(file) > 100
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="exhausted|not enough data"):
        commands.count_opcodes(file)


def test_the_tests_marked_gpu_are_run_from_their_files_and_counted() -> None:
    files = commands.gpu_test_files()
    assert "tests/core/optim/test_guard.py" in files
    assert "tests/core/build/test_notices.py" not in files
    argv = commands.pytest_argv(*files)
    assert argv[1:5] == ["-m", "pytest", "-m", "gpu"] and argv[-1] == files[-1]
    line = "1 failed, 19 passed, 3 skipped, 40 deselected, 2 errors in 12.30s"
    counts = {"failed": 1, "passed": 19, "skipped": 3, "deselected": 40, "error": 2}
    assert commands.read_counts(line) == counts


def test_a_command_with_another_exit_code_fails_with_its_output(tmp_path: Path) -> None:
    place = Workplace("cpu", tmp_path)
    with pytest.raises(CheckFailed, match=r"(?s)typo: exit code 2, not 0:.*training\.stepz"):
        place.run(Command("typo", ("training.stepz=1",)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("doctor", "device_assert", "sweep", "group_of_one", "evaluate_and_predict"),
        *("micro_batches", "debug_full", "sync_free", "kernels"),
    ],
)
def test_a_check_that_a_cpu_can_make_holds_on_it(name: str, tmp_path: Path) -> None:
    one = next(one for one in CHECKS if one.name == name)
    command = [*one.argv("cpu", tmp_path)]
    environment = prove_gpu.child_environment()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / name / "facts.json").read_text())


@pytest.mark.slow
def test_a_run_that_resumes_exactly_passes_and_a_file_that_says_otherwise_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = (*commands.RESUME_OF, "data=digits", "model=mlp", "model.dropout=0.2", "verify.steps=8")
    monkeypatch.setattr(commands, "RESUME", (Command("mlp", (*of, "optimization=basic")),))
    place = Workplace("cpu", tmp_path)
    commands.resume(place)
    assert place.facts["mlp"]["verdict"] == "exact" and place.facts["mlp"]["compared"]

    path = tmp_path / "mlp" / "verify.json"
    path.write_text(path.read_text().replace('"exact"', '"FAIL"'))
    monkeypatch.setattr(Workplace, "run", lambda *_: None)
    with pytest.raises(CheckFailed, match="mlp"):
        commands.resume(place)


def test_a_resume_file_of_another_kind_is_refused(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gpu_machine / "other.json").write_text("[1]")
    with pytest.raises(SystemExit):
        run_main(monkeypatch, [], f"--resume={gpu_machine / 'other.json'}")
    assert "other.json is not a file written by --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "Synchronization debug mode is a prototype feature and does not yet detect all calls",
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
        "Please use the new API settings to control TF32 behavior",
        "\nOnline softmax is disabled on the fly since Inductor decides to split the reduction.",
    ],
)
def test_what_torch_warns_of_on_a_gpu_is_no_error_in_a_test(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=1)
    with pytest.raises(UserWarning, match="another"):
        warnings.warn("another " + text, UserWarning, stacklevel=1)
