"""verify.what=distributed passes what is right, and names what is not by the first value of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from runner import RunConfig
from runner.core.errors import ConfigError, NotVerified
from runner.core.jobs import load_job
from runner.core.schemas.device import DistributedConfig
from runner.core.schemas.jobs import JobKind
from runner.measure.verify.distributed import (
    FP64,
    EqualityCheck,
    compare_values,
    verify_distributed,
    without_reduced_precision,
)
from runner.measure.verify.end_state import EndState, ValueKey
from runner.measure.verify.processes import ReferencePrecision, prepare_config
from tests import runs

TWO = ("distributed=ddp", "distributed.processes=2")
# 31 of 63 samples are one process's, 32 the other's
MLP = ("data=cancer", "model=mlp", "model.width=16", "training.batch_size=63", "optimizer.ema=0.9")
MLP += ("stability.clip_norm=0.1", "device.threads=1", "training.steps=4")
JOB = ("job=verify", "verify.what=distributed", "device.threads=1", *TWO)


pytestmark = pytest.mark.usefixtures("parity_mutants")


def quick(*overrides: str) -> RunConfig:
    config = prepare_config(runs.config(*MLP, *overrides), 4, checkpoint_every=2)
    config.monitoring.every = 1
    return without_reduced_precision(config)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[EndState, dict[ValueKey, float]]:
    """What one process computes, and how far rounding may bring any number of it."""
    comparison = EqualityCheck(tmp_path_factory.mktemp("one"))
    config = replace(quick(), distributed=DistributedConfig())
    exact = comparison.train("one", config, ReferencePrecision(True, fp64=True))
    return exact, comparison.limits_by_rounding(exact, config, fp64=True)


def compared(of_one: tuple[EndState, dict[ValueKey, float]], folder: Path, *overrides: str) -> str:
    comparison, (exact, limits) = EqualityCheck(folder), of_one
    config, double = quick(*TWO, *overrides), ReferencePrecision(True, fp64=True)
    comparison.compare(FP64, exact, config, double, limits)
    return comparison.result(4, config.distributed, 2, exact.facts).cause


def test_two_processes_that_are_right_are_within_rounding(
    of_one: tuple[EndState, dict[ValueKey, float]], tmp_path: Path
) -> None:
    assert compared(of_one, tmp_path) == ""
    exact, limits = of_one
    assert {item.kind for item in exact.values} >= {"metric", "parameter", "optimizer", "average"}
    assert max(limits.values()) < 1e-9


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("AveragedGradients", "it is averaged over processes where the parts weigh differently"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("WrongPart", "a process takes the wrong part of the batch"),
                ("ClippedByShard", "clipping by a part of the gradient"),
            )
        ),
    ],
)
def test_a_planted_fault_is_detected_and_its_cause_named(
    of_one: tuple[EndState, dict[ValueKey, float]], tmp_path: Path, fault: str, cause: str
) -> None:
    planted = f"optimization.extra=[parity_mutants.{fault}]"
    assert cause in compared(of_one, tmp_path, planted, "security.trusted=[parity_mutants]")


@pytest.mark.slow
def test_the_job_names_batchnorm_per_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cnn = ("data=digits", "model=cnn", "model.width=8", "model.stages=1")
    few = ("verify.steps=2", "data.validation_samples=50", "distributed.sync_batchnorm=false")
    with pytest.raises(NotVerified, match=r"train/.* at step 1 .*distributed\.sync_batchnorm=fal"):
        load_job(JobKind.verify)(runs.config(*JOB, *cnn, *few), tmp_path)
    result = runs.read(tmp_path, "verify.json")
    assert (result["what"], result["verdict"], result["processes"]) == ("distributed", "FAIL", 2)
    assert result["distance"] > 100 * result["limit"]
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]
    assert "likely cause" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (*MLP, "training.micro_batch=5", "model.dropout=0.2"),
        ("model=cnn", "model.width=8", "training.batch_size=127", "optimizer=sgd"),
        (
            *("distributed=fsdp", "data=synthetic", "data.form=tokens", "data.samples=64"),
            *("model=gpt", "data.sequence=16", "model.width=32", "training.batch_size=23"),
        ),
        ("optimization=amp", "optimization.amp.dtype=bf16", "optimizer=sgd"),
        ("model._target_=parity_mutants.WrittenInFp32", "security.trusted=[parity_mutants]"),
    ],
)
def test_runs_that_are_right_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    found = verify_distributed(runs.config(*JOB, *overrides), tmp_path)
    assert found.equal, (found.first, found.distance, found.limit, found.cause)
    coarse = any("not compared in fp64" in note for note in found.notes)
    assert coarse is ("WrittenInFp32" in overrides[0])


def test_state_that_a_fused_optimizer_has_before_its_first_update_is_no_difference() -> None:
    assert not list(compare_values({}, {ValueKey(0, "optimizer", "state.0.step"): 0.0}, {}))
    (missing,) = compare_values({}, {ValueKey(4, "optimizer", "state.0.step"): 0.0}, {})
    assert not missing.distance <= missing.limit


@pytest.mark.parametrize("part", ["optimizer.param_groups", "options"])
def test_options_that_techniques_choose_are_no_difference(part: str) -> None:
    plain, fused = ({ValueKey(4, "optimizer", f"{part}.0.fused"): on} for on in (None, True))
    assert not list(compare_values(plain, fused, {}))
    (weight,) = compare_values({}, {ValueKey(4, "parameter", f"{part}.0.fused"): 1.0}, {})
    assert weight.distance > weight.limit


def test_one_process_and_a_launcher_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [text for text in JOB if not text.startswith("distributed")]
    with pytest.raises(ConfigError, match=r"verify\.what: distributed needs several processes"):
        load_job(JobKind.verify)(runs.config(*alone), tmp_path)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="type it without torchrun"):
        load_job(JobKind.verify)(runs.config(*JOB), tmp_path)
