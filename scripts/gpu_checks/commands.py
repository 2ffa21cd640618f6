"""Checks that type commands and judge what these wrote."""

from __future__ import annotations

import csv
import pickletools
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_checks.base import (
    ROOT,
    CheckFailed,
    CheckSkipped,
    Command,
    Workplace,
    child_environment,
    last_lines,
    require,
    require_engaged,
    technique_rows,
)

QUICK = ("monitoring=quiet", "monitoring.tensorboard=false")
TRUSTED = (*QUICK, "security.trusted=[gpu_checks]")
MARK = "pytest.mark.gpu"
METRIC_TOLERANCE = 1e-4  # relative, of a metric on two devices
OTHER_PREDICTIONS = 0.005  # share of samples so near a tie that rounding decides
WEIGHT_TOLERANCE = 1e-6  # relative, of all weights with a group of one process and without

# -- doctor ----------------------------------------------------------------------------------------

DOCTOR = (Command("doctor", ("job=doctor",)),)


def doctor(place: Workplace) -> None:
    """The doctor finds the device, and each technique that it should be able to run."""
    place.run(*DOCTOR)
    report = place.read_json("doctor", "doctor.json")
    device, techniques = report["device"], {row["name"]: row for row in report["techniques"]}
    place.record(
        name=device["name"], versions=report["versions"], capabilities=device["capabilities"],
        settings=device["settings"], status=report["status"],
        not_ok=[f"{c['name']}: {c['finding']}" for c in report["checks"] if c["status"] != "ok"],
        unavailable={n: row["reason"] for n, row in techniques.items() if not row["available"]},
    )  # fmt: skip
    require(device["kind"] == place.device, f"the device is {device['kind']}")
    names = ("compile", "whole_step", "fused_optimizer")
    names += ("amp", "cuda_graphs", "tf32") if place.device == "cuda" else ()
    for name in names:
        row = techniques[name]
        require(row["available"], f"{name} is not available: {row['reason']}")


# -- the tests that are marked gpu -----------------------------------------------------------------


def gpu_test_files() -> list[str]:
    """Return the test files with a test marked `gpu`; the others may need further packages."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if MARK in f.read_text()]


def pytest_argv(*more: str) -> list[str]:
    """Return the command of the tests marked `gpu`, four at a time if xdist is installed."""
    parallel = ["-n", "4"] if find_spec("xdist") else []
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-rfEs"]
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *parallel, *options, *more]


def gpu_tests(place: Workplace) -> None:
    """All tests marked `gpu` pass, and none is skipped.

    If some fail, they run once more without FutureWarnings as errors, which says whether only a
    deprecated call of torch's is in the way.
    """
    if find_spec("pytest") is None:
        raise CheckSkipped("pytest is not installed")
    counts = _run_pytest(place, "tests")
    place.record(counts=counts)
    if counts.get("failed") or counts.get("error"):
        again = _run_pytest(place, "without_warnings", "-o", "filterwarnings=ignore::FutureWarning")
        place.record(without_future_warnings=again)
    failures = last_lines(place.folder / "tests.log", 15)
    require(counts["exit_code"] == 0, f"exit code {counts['exit_code']}:\n{failures}")
    require(counts.get("passed"), "no test ran")
    require(not counts.get("skipped"), f"tests were skipped:\n{failures}")


def _run_pytest(place: Workplace, name: str, *more: str) -> dict[str, int]:
    import subprocess

    log = place.folder / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            pytest_argv(*more, *gpu_test_files()), cwd=ROOT, env=child_environment(),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip
    return {"exit_code": code, **read_counts(last_lines(log, 1))}


def read_counts(line: str) -> dict[str, int]:
    """Return the numbers of pytest's last line by outcome: `19 passed, 2 failed in 3.10s`."""
    found = re.findall(r"(\d+) (passed|failed|error|skipped|deselected)", line)
    return {outcome: int(number) for number, outcome in found}


# -- exact resume ----------------------------------------------------------------------------------

GPT = ("data=stdlib_text", "model=gpt", "model.dropout=0.1", "training.batch_size=8")
RESUME_OF = ("job=verify", "verify.what=resume", "device.deterministic=true")
ULTRA = ("optimization=ultra", "optimization.measure=false")
RESUME = (
    Command("gpt_ultra", (*RESUME_OF, *GPT, *ULTRA)),
    Command(
        "gpt_advanced", (*RESUME_OF, *GPT, "optimization=advanced", "optimization.measure=false")
    ),
    Command(
        "cnn_advanced",
        (
            *RESUME_OF,
            "data=digits",
            "model=cnn",
            "optimization=advanced",
            "optimization.measure=false",
        ),
    ),
)


def resume(place: Workplace) -> None:
    """Runs that are killed and resumed end in the same bits as uninterrupted ones."""
    try:
        place.run(*RESUME)
    finally:
        for command in RESUME:
            if (place.folder / command.name / "verify.json").is_file():
                result = place.read_json(command.name, "verify.json")
                kept = ("verdict", "compared", "differing", "cause", "techniques")
                place.record(**{command.name: {name: result[name] for name in kept}})
    for command in RESUME:
        result = place.facts[command.name]
        require(result["verdict"] == "exact", f"{command.name}: {result['differing'][:3]}")


# -- a device-side assert, and what a user's code may contain --------------------------------------

USER = "gpu_checks.user_code"
TABLE = ("data=cancer", "training.steps=20")
DEVICE_ASSERT = (
    Command(
        "wrong_index",
        (
            *TRUSTED, "data=cancer", f"model._target_={USER}.LateIndexNet", "optimization=none",
            "training.steps=60",
        ),
        exit_code=1,
    ),
    Command("tf32_switch", (*TRUSTED, *TABLE, f"model._target_={USER}.Tf32Net")),
    Command("fp64_model", (*TRUSTED, *TABLE, f"model._target_={USER}.DoubleNet")),
    Command("adagrad", (*QUICK, *TABLE, "optimizer.name=Adagrad", "optimization=basic")),
    Command(
        "hidden_gpu",
        (*QUICK, *TABLE, "device=auto"),
        variables={"CUDA_VISIBLE_DEVICES": ""},
    ),
)  # fmt: skip


def device_assert(place: Workplace) -> None:
    """An assert in a kernel ends a run as `failed` with its reason; other user code trains."""
    failed, *others = DEVICE_ASSERT
    place.run(*DEVICE_ASSERT)
    summary = place.summary(failed.name, "failed")
    place.record(wrong_index={"reason": summary["reason"], "steps": summary["steps"]})
    require(summary["reason"], "the summary of the failed run has no reason")
    require(summary["steps"] > 0, "it failed before the first step")
    history = place.read_json(failed.name, "debug", "history.json")
    require(history, "the history of the failed run is empty")
    for command in others:
        summary = place.summary(command.name)
        place.record(**{command.name: {"device": summary["device"]["kind"]}})
        expected = "cpu" if command.name == "hidden_gpu" else place.device
        require(place.facts[command.name]["device"] == expected, f"{command.name}: not {expected}")
    reason = place.summary("hidden_gpu")["device"]["reason"]
    require("auto: no accelerator" in reason, f"hidden_gpu: no note that it is on a CPU: {reason}")


# -- a sweep ---------------------------------------------------------------------------------------

SWEEP = (
    Command(
        "sweep",
        (
            *QUICK, "seed=0,1", "hydra.launcher.jobs=2", "data=digits", "data.workers=2",
            "training.steps=20",
        ),
        sweep=True,
    ),
)  # fmt: skip


def sweep(place: Workplace) -> None:
    """Two jobs of a sweep, forked side by side, train with worker processes of their own.

    A parent that had used CUDA before it forked would make both fail.
    """
    place.run(*SWEEP)
    jobs = place.read_json("sweep", "sweep.json")["jobs"]
    summaries = [place.summary(f"sweep/{job['folder']}") for job in jobs]
    devices = [f"{s['device']['kind']} {s['device']['index']}" for s in summaries]
    place.record(jobs=[job["status"] for job in jobs], devices=devices)
    require([job["status"] for job in jobs] == ["done", "done"], "not both jobs are done")
    require(all(name.startswith(place.device) for name in devices), f"devices: {devices}")


# -- debug=full ------------------------------------------------------------------------------------

DEBUG_FULL = (
    Command("full", (*QUICK, "data=digits", "model=cnn", "debug=full", "training.steps=40")),
)
LAUNCH_CALLS = ("cuda", "hip", "cuLaunch")


def debug_full(place: Workplace) -> None:
    """The profile is consistent in itself, and the allocator's snapshot can be read."""
    place.run(*DEBUG_FULL)
    place.summary("full")
    profile = place.read_json("full", "debug", "profile.json")
    facts, trace = profile["facts"], profile["trace"]
    kernels_ms = sum(row["seconds"] for row in trace["operators"]) / max(1, trace["steps"]) * 1e3
    files = sorted((place.folder / "full" / "debug").rglob("*.pickle"))
    place.record(
        busy=facts["busy"], operators=facts["operators"], step_ms=facts["step_ms"],
        operators_ms=kernels_ms, verdicts=profile["verdicts"],
        snapshots={file.name: count_opcodes(file) for file in files},
    )  # fmt: skip
    require(trace["operators"], "the profile has no operator")
    counted = [r["name"] for r in trace["operators"] if r["name"].startswith(LAUNCH_CALLS)]
    require(not counted, f"launches are counted as operators: {counted}")
    if place.device == "cuda":
        require(facts["busy"] is not None and 0 < facts["busy"] <= 1, f"busy: {facts['busy']}")
        require(files, "no snapshot of the allocator was written")


def count_opcodes(path: Path) -> int:
    """Return the number of a pickle's opcodes without executing them; ValueError if it is cut."""
    with path.open("rb") as file:
        return sum(1 for _ in pickletools.genops(file))


# -- a group of one process ------------------------------------------------------------------------

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
GROUP_OF = (
    *QUICK, "data=digits", "model=mlp", "training.steps=20", "optimization=basic",
    "optimization.measure=false",
)  # fmt: skip
GROUP_OF_ONE = (
    Command("one", GROUP_OF),
    Command("ddp", (*GROUP_OF, "distributed=ddp"), launcher=TORCHRUN),
    Command("fsdp", (*GROUP_OF, "distributed=fsdp"), launcher=TORCHRUN),
    Command(
        "ddp_bf16",
        (
            *GROUP_OF, "distributed=ddp", "optimization.amp.enabled=true",
            "optimization.amp.dtype=bf16", "distributed.compression=bf16",
        ),
        launcher=TORCHRUN,
    ),
)  # fmt: skip


def group_of_one(place: Workplace) -> None:
    """A group of one process trains through NCCL (gloo on a CPU) as one process without it."""
    import torch.distributed

    if place.device == "cuda" and not torch.distributed.is_nccl_available():
        raise CheckSkipped("torch is built without NCCL")
    place.run(*GROUP_OF_ONE)
    summaries = {command.name: place.summary(command.name) for command in GROUP_OF_ONE}
    backends = {name: s["distributed"].get("backend") for name, s in summaries.items()}
    distance = weight_distance(
        place.folder / "one" / "checkpoints" / "last", place.folder / "ddp" / "checkpoints" / "last"
    )
    losses = {name: s["metrics"]["val/loss"] for name, s in summaries.items()}
    place.record(backends=backends, weight_distance=distance, losses=losses)
    expected = "nccl" if place.device == "cuda" else "gloo"
    for name in ("ddp", "fsdp", "ddp_bf16"):
        require(backends[name] == expected, f"{name}: backend {backends[name]}, not {expected}")
    require(distance <= WEIGHT_TOLERANCE, f"ddp: weights differ by {distance:.1e} of their size")
    require(_close(losses["fsdp"], losses["one"], METRIC_TOLERANCE), f"fsdp: losses {losses}")


def weight_distance(first: Path, second: Path) -> float:
    """Return the distance of two checkpoints' weights, relative to the size of the first."""
    from safetensors.torch import load_file

    a, b = (load_file(checkpoint_folder(path) / "model.safetensors") for path in (first, second))
    require(a.keys() == b.keys(), "the checkpoints have different weights")
    floats = [name for name in a if a[name].is_floating_point()]
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in floats)
    size = sum(float(a[n].double().square().sum()) for n in floats)
    return float((difference / size) ** 0.5)


def checkpoint_folder(path: Path) -> Path:
    """Return the folder that `last` or `best` names: a link, or a file with its name."""
    return path.parent / path.read_text().strip() if path.is_file() else path


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-12)


# -- evaluate and predict --------------------------------------------------------------------------

IN_FP32 = ("optimization=basic", "optimization.measure=false")
TRAINED = Command("trained", (*QUICK, *IN_FP32, "data=digits", "model=cnn", "training.steps=60"))
OF_TRAINED = ("checkpoint.resume={folder}/trained",)
EVALUATE_AND_PREDICT = (
    TRAINED,
    Command("evaluate", ("job=evaluate", *OF_TRAINED, "evaluate.export=export")),
    Command("predict", ("job=predict", *OF_TRAINED)),
    Command("evaluate_cpu", ("job=evaluate", *OF_TRAINED, "device=cpu")),
    Command("predict_cpu", ("job=predict", *OF_TRAINED, "device=cpu")),
)


def evaluate_and_predict(place: Workplace) -> None:
    """A checkpoint gives the same metrics and predictions on its device and on a CPU."""
    place.run(TRAINED)
    place.run(*EVALUATE_AND_PREDICT[1:])
    own, cpu = place.summary("evaluate"), place.summary("evaluate_cpu")
    share = same_predictions(place.folder / "predict", place.folder / "predict_cpu")
    place.record(
        loss=own["metrics"]["val/loss"], loss_cpu=cpu["metrics"]["val/loss"],
        accuracy=own["metrics"]["val/accuracy"], accuracy_cpu=cpu["metrics"]["val/accuracy"],
        same_predictions=share, export=own["export"],
        devices=[own["device"]["kind"], cpu["device"]["kind"]],
    )  # fmt: skip
    facts = place.facts
    require(facts["devices"] == [place.device, "cpu"], f"devices: {facts['devices']}")
    for name in ("loss", "accuracy"):
        pair = facts[name], facts[f"{name}_cpu"]
        require(_close(*pair, METRIC_TOLERANCE), f"{name}: {pair[0]} and {pair[1]} on a CPU")
    require(share >= 1 - OTHER_PREDICTIONS, f"only {share:.2%} of the predictions are the same")
    require(facts["export"].get("bytes"), f"nothing was exported: {facts['export']}")


def same_predictions(first: Path, second: Path) -> float:
    """Return the share of rows with the same prediction in two files of job=predict."""
    rows = []
    for folder in (first, second):
        with (folder / "predictions.csv").open(newline="") as file:
            rows.append([row["prediction"] for row in csv.DictReader(file)])
    if len(rows[0]) != len(rows[1]) or not rows[0]:
        raise CheckFailed(f"{len(rows[0])} and {len(rows[1])} predictions")
    return sum(a == b for a, b in zip(*rows, strict=True)) / len(rows[0])


# -- micro-batches and CUDA graphs -----------------------------------------------------------------

CUT = (
    *QUICK, *ULTRA, "optimization.amp.enabled=false", "optimization.tf32.enabled=false",
    "optimizer=sgd", "optimizer.lr=0.01", "data=digits", "model=cnn", "training.batch_size=32",
    "training.micro_batch=16", "training.steps=20", "data.drop_last=true",
)  # fmt: skip
MICRO_BATCHES = (
    Command("with_graphs", CUT),
    Command("without_graphs", (*CUT, "optimization.cuda_graphs.enabled=false")),
)
SUM_TOLERANCE = 1e-4  # relative, of weights after 20 steps of SGD with sums in another order


def micro_batches(place: Workplace) -> None:
    """CUDA graphs are refused with a reason where a step has several backward passes."""
    place.run(*MICRO_BATCHES)
    summaries = [place.summary(command.name) for command in MICRO_BATCHES]
    row = technique_rows(summaries[0])["cuda_graphs"]
    folders = [place.folder / c.name / "checkpoints" / "last" for c in MICRO_BATCHES]
    place.record(cuda_graphs=row, weight_distance=weight_distance(*folders))
    require(not row["engaged"] and row["reason"], f"cuda_graphs was not refused: {row}")
    distance = place.facts["weight_distance"]
    require(distance <= SUM_TOLERANCE, f"weights differ by {distance:.1e} of their size")
    if place.device == "cuda":
        require_engaged(summaries[0], ["compile"], "with_graphs")
