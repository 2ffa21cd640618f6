"""Every technique shows that it took hold, or says why it could not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

from runner import build, compose, train
from runner.errors import ConfigError
from runner.report.format import technique_status
from runner.techniques.base import Evidence, RunBuilder, Technique, TechniqueStatus
from runner.techniques.config import Optimization
from runner.training.evidence import technique_statuses
from runner.training.run import Run
from runner.training.summary import Summary

QUICK = ["training.steps=4", "monitoring.progress=false", "device=cpu", "device.threads=2"]


def trained(*overrides: str) -> Summary:
    with build(compose([*QUICK, *overrides])) as run:
        return train(run)


def row(summary: Summary, name: str) -> TechniqueStatus:
    return next(row for row in summary.techniques if row.name == name)


def test_fp16_runs_with_a_loss_scale() -> None:
    amp = row(trained("optimization=amp", "optimization.amp.dtype=fp16"), "amp")
    assert amp.engaged
    assert amp.evidence["loss_scale"] > 1


@pytest.mark.parametrize(
    ("optimizer", "ran", "guard"),
    [
        ("AdamW", "fused", "in the kernel"),
        ("SGD", "fused", "in the kernel"),
        ("RAdam", "foreach", "host reads a flag"),
    ],
)
def test_the_fused_optimizer_says_what_ran(optimizer: str, ran: str, guard: str) -> None:
    fused = row(trained("optimization=basic", f"optimizer.name={optimizer}"), "fused_optimizer")
    assert fused.evidence["implementation"] == ran
    assert fused.evidence["guard"] == guard
    assert fused.evidence["weights"] == ("6 of 6" if ran == "fused" else "0 of 6")
    assert fused.engaged is (ran == "fused")
    assert ran == "fused" or "no fused kernel" in fused.reason


def test_accumulation_counts_its_backward_passes() -> None:
    cut = row(trained("optimization=memory_efficient", "training.batch_size=32"), "accumulation")
    assert cut.engaged
    assert cut.evidence == {"micro_batch": 8, "backward_per_update": 4}


def test_tf32_is_refused_on_a_cpu_with_the_reason_and_is_an_error_under_strict() -> None:
    refused = row(trained("optimization.tf32.enabled=true"), "tf32")
    assert refused.requested
    assert not refused.engaged
    assert "no TF32" in refused.reason
    with pytest.raises(ConfigError, match=r"optimization\.tf32.*cannot take hold"):
        build(compose([*QUICK, "optimization.tf32.enabled=true", "optimization.strict=true"]))


def test_a_closed_run_leaves_no_global_switch_behind(tmp_path: Path) -> None:
    def switches() -> list[object]:
        return [
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.cuda.matmul.allow_tf32,
            torch.is_grad_enabled(),
        ]

    before = switches()
    trained("debug=anomaly", "optimization=amp", "device.deterministic=true", "device.threads=1")
    assert switches() == before


def test_what_a_failed_run_never_looked_at_is_not_called_a_fall_back() -> None:
    with build(compose([*QUICK, "optimization=basic", "device.threads=1"])) as run:
        first = next(engagement for engagement in technique_statuses(run) if engagement.requested)
        assert not first.known
        assert technique_status(asdict(first)) == "unknown"
        summary = train(run)
    assert all(engagement.known for engagement in summary.techniques)


@pytest.mark.parametrize(
    ("asked", "name"), [(["optimization.whole_step.enabled=true"], "whole_step"), ([], "compile")]
)
def test_anomaly_mode_at_every_step_is_said_to_keep_it_from_being_compiled(
    asked: list[str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = ["optimization=none", "optimization.compile.enabled=true", *asked]
    summary = trained(*compiled, "debug=anomaly")
    said = "debug=anomaly looks at every step"
    assert f"optimization.{name}: {said}" in caplog.text
    assert "debug.anomaly.every=50" in caplog.text
    for technique in {name, "compile"}:
        assert not row(summary, technique).engaged
        assert said in row(summary, technique).reason


@dataclass
class HalfBatch(Technique):
    """A technique as somebody would add it to the runner."""

    share: float = 0.5

    def apply(self, draft: RunBuilder) -> None:
        """Cut the batch."""
        draft.micro_batch = int(draft.batch_size * self.share)

    def engaged(self, run: Run) -> Evidence:
        """The size that the loop uses."""
        return Evidence(True, "", {"micro_batch": run.micro_batch})


@dataclass
class WithOneMore(Optimization):
    """The group with one line more."""

    half_batch: HalfBatch = field(default_factory=HalfBatch)


def test_a_field_of_the_group_is_all_that_registers_a_technique() -> None:
    config = compose([*QUICK, "optimization=none", "training.batch_size=32"])
    config.optimization = WithOneMore(half_batch=HalfBatch(enabled=True))
    with build(config) as run:
        summary = train(run)
    assert [row.name for row in summary.techniques][-1] == "half_batch"
    found = row(summary, "half_batch")
    assert found.engaged and found.evidence == {"micro_batch": 16}
