"""scripts/plan_scale.py, alone and against runs that send, keep and write real bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.scale.distributed.processes import alone

ROOT = Path(__file__).parents[3]
GPT = ["data=stdlib_text", "model=gpt", "training.batch_size=8", "optimization=none"]
GPT += ["optimizer.ema=0.99", "data.drop_last=true"]
WIRE = """
import json
from pathlib import Path
from runner.core.interfaces.hook import Hook

FIRST, LAST = 5, 25


class Wire(Hook):
    def __init__(self):
        self.sent = 0

    def on_step(self, run, step):
        if step.number not in (FIRST, LAST):
            return
        lines = Path("/proc/net/dev").read_text().splitlines()
        sent = next(int(x.split()[1]) for x in lines if x.strip().startswith("lo:"))
        self.sent = sent - self.sent
        if step.number == LAST:
            state = [t for s in run.update.optimizer.state.values() for t in s.values()]
            weights = sum(p.nbytes for g in run.update.optimizer.param_groups for p in g["params"])
            rank = run.world.rank
            facts = {
                "sent": self.sent / (LAST - FIRST),
                "weights": weights,
                "optimizer": sum(t.nbytes for t in state),
                "average": sum(t.nbytes for t in run.update.average),
            }
            Path(f"{rank}.json").write_text(json.dumps(facts))
"""


def planned(*arguments: str) -> list[dict[str, Any]]:
    done = runs.python("scripts/plan_scale.py", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_plan_for_1024_ranks_adds_up_and_allocates_nothing() -> None:
    large = ["model.width=8192", "model.depth=2", "model.heads=64", "training.batch_size=1024"]
    large += ["optimization.recompute.enabled=true", "optimization.amp.enabled=true"]
    ddp, fsdp = planned(*GPT, *large, "--ranks=1024", "--node-mtbf-h=1000")
    whole = 4 * ddp["parameters"]
    assert whole > 6e9  # one of four such copies
    assert ddp["weights"] == ddp["gradients"] == ddp["average"] == whole
    assert ddp["optimizer"] == pytest.approx(2 * whole, rel=1e-3)
    assert ddp["peak"] > ddp["weights"] + ddp["gradients"] + ddp["optimizer"] + ddp["average"]
    assert ddp["sent"] == pytest.approx(2 * 1023 / 1024 * whole, rel=1e-3)
    assert (fsdp["kind"], fsdp["ranks"], fsdp["samples"]) == ("fsdp", 1024, 1)
    assert fsdp["gradients"] == fsdp["weights"] == pytest.approx(whole / 1024, rel=0.01)
    # gathered twice in 16 bits, and its gradients in 32
    assert fsdp["sent"] == pytest.approx(2 * 1023 / 1024 * whole, rel=0.02)
    assert fsdp["checkpoint"] == pytest.approx(ddp["checkpoint"], rel=0.01)
    assert fsdp["failure_s"] == pytest.approx(1000 * 3600 / 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes", "own"),
    [
        *(("ddp", count, []) for count in (1, 2, 4)),
        *(("fsdp", count, []) for count in (2, 4)),
        ("ddp", 2, ["training.micro_batch=1"]),
        ("fsdp", 2, ["training.micro_batch=1"]),
        ("fsdp", 2, ["training.micro_batch=1", "distributed.no_sync=false"]),
    ],
)
def test_the_plan_is_what_a_run_keeps_writes_and_sends(
    kind: str, processes: int, own: list[str], tmp_path: Path
) -> None:
    (tmp_path / "wire.py").write_text(WIRE)
    typed = [*GPT, *own, f"distributed={kind}", f"distributed.processes={processes}"]
    typed.append("training.steps=30")
    typed += ["training.validate_every=100", *runs.QUICK[:1], "monitoring.progress=false"]
    typed += ["+debug.hooks=[{_target_: wire.Wire}]", "security.trusted=[wire]"]
    command = [sys.executable, "-m", "runner", *typed, "hydra.run.dir=outputs/a"]
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network of its own here, in which to count bytes")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [*alone, *command]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = planned(*GPT, *own, f"distributed={kind}", f"--ranks={processes}")[0]
    kept = [runs.read(tmp_path, f"{rank}.json") for rank in range(processes)]
    for part in ("weights", "optimizer", "average"):  # the first rank has the largest shards
        assert kept[0][part] == plan[part] >= max(facts[part] for facts in kept)
    sent = processes * plan["sent"]
    if kind == "fsdp":  # gloo sums by an all-reduce where a ring would reduce and scatter
        times = plan["samples"] if "distributed.no_sync=false" in own else 1
        sent += processes * (processes - 1) * plan["weights"] * times
    assert kept[0]["sent"] == pytest.approx(sent, rel=0.05, abs=1e4)
    saved = tmp_path / "outputs" / "a" / "checkpoints" / "last"
    files = sum(path.stat().st_size for path in saved.iterdir())
    assert files == pytest.approx(plan["checkpoint"], rel=0.02)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_no_16_bit_copy_of_a_gathered_weight_outlives_its_block(kind: str) -> None:
    amp = ("optimization=amp", "optimization.amp.dtype=bf16", f"distributed={kind}")
    with alone(runs.config("data=digits", *amp, "training.steps=2")) as run:
        (context,) = run.contexts
        with context():
            assert torch.is_autocast_cache_enabled() is (kind == "ddp")
