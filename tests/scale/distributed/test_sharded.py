"""distributed=fsdp: the numbers of one process, and checkpoints that any number of them reads."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runner import RunConfig
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.folder import RestoredCheckpoint
from runner.core.errors import ConfigError
from runner.core.jobs import evaluate
from tests import runs
from tests.scale.distributed import runs as started
from tests.scale.distributed.processes import Case, Outcome, run_one, run_together

ON = "optimization.{}.enabled=true".format
ALL = ("optimizer.ema=0.9", "stability.clip_norm=0.1", "schedule=cosine")
MLP = ("data=cancer", "model=mlp", "training.batch_size=150", *ALL)  # the last batch: 5
TOKENS = ("data=synthetic", "data.form=tokens", "data.samples=66", "data.sequence=16")
GPT = (*TOKENS, "model=gpt", "model.width=32", "training.batch_size=12", *ALL)
CNN = ("data=digits", "model=cnn", "training.batch_size=128", "model.width=8", *ALL)
CNN += ("data.validation_samples=101",)
NEAR = 1e-8  # Adam divides a gradient that is nearly 0, and so its rounding, by its size


def config(kind: str, processes: int, *overrides: str) -> RunConfig:
    """A run in fp64 that saves at step 4 and at its end, and validates between these."""
    several_ = (f"distributed.processes={processes}",) if processes > 1 else ()
    made = runs.config(
        *("device.threads=1", "optimization=none", "security.trusted=[double]"),
        *("checkpoint.every=4", "training.validate_every=3", "training.steps=8"),
        *(f"distributed={kind}", *several_, *overrides),
    )
    made.optimization.extra = ["double"]
    return made


def make(processes: int, cases: Mapping[str, Case]) -> list[dict[str, Outcome]]:
    """What each process has of each run, none of which ended with an error."""
    found = run_together(processes, cases)
    assert not [outcome.error for rank in found for outcome in rank.values() if outcome.error]
    return found


def saved(folder: Path) -> RestoredCheckpoint:
    restored = Checkpointer(None, keep=1).restore(folder)
    assert restored is not None and not restored.warnings
    return restored


def tensors(restored: RestoredCheckpoint) -> dict[str, Tensor]:
    """Weights, averages and the optimizer's state of a checkpoint."""
    update = restored.state["update"]
    found = {**restored.model, **{f"ema {i}": a for i, a in enumerate(update["average"])}}
    for number, entries in update["optimizer"]["state"].items():
        found |= {f"{number} {k}": v for k, v in entries.items() if isinstance(v, Tensor)}
    return found


def assert_equal(ours: RestoredCheckpoint, theirs: RestoredCheckpoint, to: float) -> None:
    a, b = tensors(ours), tensors(theirs)
    assert ours.step == theirs.step and a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=to, atol=to)


EQUAL = {
    "mlp": MLP,
    "accumulation": (*MLP, "training.micro_batch=20"),
    "recompute": (*GPT, ON("recompute"), "training.micro_batch=5"),
    "cnn": (*CNN, ON("chunked_loss"), ON("channels_last")),
    "sgd": (*MLP, "optimizer=sgd", "optimizer.options.momentum=0.9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_weights_state_and_metrics_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    names = list(EQUAL) if processes > 2 else ["accumulation", "recompute"]
    cases = {name: (config("fsdp", processes, *EQUAL[name]), tmp_path / name) for name in names}
    found = make(processes, cases)
    for name in names:
        alone = tmp_path / f"one {name}"
        one = run_one(config("none", 1, *EQUAL[name]), alone)
        assert_equal(saved(tmp_path / name), saved(alone), NEAR)
        for rank in found:
            assert rank[name].moved == 0
            assert rank[name].metrics == pytest.approx(one.metrics, abs=NEAR)
        assert found[0][name].facts["fsdp"]["modules"] >= (1 if "data=cancer" in EQUAL[name] else 3)


@pytest.mark.slow
def test_a_checkpoint_resumes_with_any_number_of_processes(tmp_path: Path) -> None:
    """none → fsdp, fsdp → none, fsdp → ddp, and fsdp → fsdp to the last bit."""
    whole, part = tmp_path / "whole", tmp_path / "whole/checkpoints/step_00000004"
    run_one(config("none", 1, *MLP), tmp_path / "one")
    resumed = f"checkpoint.resume={part}"
    cases = {
        "whole": config("fsdp", 2, *MLP),
        "fsdp": config("fsdp", 2, *MLP, resumed),
        "ddp": config("ddp", 2, *MLP, resumed),
        "back": config("fsdp", 2, *MLP, resumed.replace("whole", "one")),
    }
    make(2, {name: (case, tmp_path / name) for name, case in cases.items()})
    run_one(config("none", 1, *MLP, resumed), tmp_path / "none")
    for name, error in (("fsdp", 0.0), ("none", NEAR), ("ddp", NEAR), ("back", NEAR)):
        assert_equal(saved(tmp_path / name), saved(whole), error)
    files = {path.name for path in part.iterdir()}
    assert {"shard_00000_of_00002.safetensors", "shard_00001_of_00002.safetensors"} < files
    assert "model.safetensors" not in files
    assert (tmp_path / "ddp/checkpoints/step_00000008/model.safetensors").is_file()
    assert_one_process_evaluates(whole, tmp_path / "evaluated", saved(whole))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_two_processes_go_on_as_four_and_those_as_one(
    tmp_path: Path, first: str, then: str
) -> None:
    whole = tmp_path / "one"
    run_one(config("none", 1, *MLP), whole)
    make(2, {"two": (config(first, 2, *MLP), tmp_path / "two")})
    part = f"checkpoint.resume={tmp_path / 'two/checkpoints/step_00000004'}"
    cases = {
        kind: (config(kind, 4, *MLP, part, "checkpoint.every=2"), tmp_path / kind)
        for kind in (first, then)
    }
    make(4, cases)
    for kind in (first, then):
        four = f"checkpoint.resume={tmp_path / kind}/checkpoints/step_00000006"
        run_one(config("none", 1, *MLP, four), tmp_path / f"{kind} one")
        assert_equal(saved(tmp_path / f"{kind} one"), saved(whole), NEAR)


def assert_one_process_evaluates(run: Path, folder: Path, restored: RestoredCheckpoint) -> None:
    """And writes the whole model, with the averaged weights, into one file."""
    jobs = ("job=evaluate", f"checkpoint.resume={run}/checkpoints/last", "evaluate.export=weights")
    evaluate.main(runs.config("optimization=none", *MLP, *jobs), folder)
    exported = load_file(folder / "exports/model.safetensors")
    assert exported.keys() == restored.model.keys()
    averages = restored.state["update"]["average"]
    assert sorted(t.shape for t in exported.values()) == sorted(t.shape for t in averages)
    for average in averages:
        assert any(
            a.shape == average.shape and torch.allclose(a.double(), average, atol=1e-6)
            for a in exported.values()
        )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1:forward:kill:7", "0:backward:kill:7", "1:backward:hang:7"])
def test_after_a_lost_process_the_shards_end_in_the_same_bits(tmp_path: Path, fault: str) -> None:
    typed = ("distributed.kind=fsdp", "distributed.restarts=1")
    whole = started.run(tmp_path / "whole", "", *typed)
    lost = started.run(tmp_path / "lost", fault, *typed)
    assert (whole.code, lost.code) == (0, 0), lost.output
    assert len(lost.summary["distributed"]["restarts"]) == 1
    for rank in range(2):
        shard = f"checkpoints/step_00000012/shard_0000{rank}_of_00002.safetensors"
        assert (tmp_path / "whole" / shard).read_bytes() == (tmp_path / "lost" / shard).read_bytes()


@pytest.mark.slow
def test_once_memory_has_run_out_no_process_holds_whole_gradients(tmp_path: Path) -> None:
    done = started.run(tmp_path / "run", "1:forward:oom:5", "distributed.kind=fsdp")
    assert done.code == 0, done.output
    row = next(row for row in done.summary["techniques"] if row["name"] == "fsdp")
    calls, modules = row["evidence"]["collectives"], row["evidence"]["modules"]
    assert calls["reduce_scatter"] == 2 * modules  # of two micro-batches in place of one


@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint_of_all_shards_and_an_error_none_in_part(
    tmp_path: Path,
) -> None:
    ended = started.run(tmp_path / "term", "1:on_step:term:6", "distributed.kind=fsdp")
    assert ended.code == 143 and saved(tmp_path / "term").step == 6
    failed = started.run(tmp_path / "error", "1:backward:raise:6", "distributed.kind=fsdp")
    assert failed.code == 1 and saved(tmp_path / "error").step == 4


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("stability.clip_value=1", "stability.clip_value"),
        ("stability.clip_adaptive=0.1", "stability.clip_adaptive"),
        ("stability.clip_per_group=true", "stability.clip_per_group"),
        ("debug=gradients", "debug.gradients"),
        ("distributed.compression=bf16", "distributed.compression"),
    ],
)
def test_what_needs_whole_weights_is_refused_by_its_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        runs.config("distributed=fsdp", override)


PRESERVED = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from runner.core.preserved_state import preserve_state
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
x = torch.rand(5, 4)
with preserve_state(model, device=torch.device("cpu")):
    before = model(x)
after = model(x)
after.sum().backward()
print(torch.equal(after, before), model[0].weight.grad is not None)
distributed.destroy_process_group()
"""


def test_a_sharded_model_trains_after_its_state_was_preserved() -> None:
    assert runs.printed_by(PRESERVED).split() == ["True", "True"]
