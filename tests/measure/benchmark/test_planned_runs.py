"""What a benchmark says of a run of the typed length, which its measured runs are not."""

from __future__ import annotations

from runner.core.security.pickle_transfer import pickle_parts
from runner.measure.benchmark.workers.worker import planned_techniques
from tests.runs import config


def test_a_short_run_of_a_level_that_compiles_when_measured_skips_compiling() -> None:
    short = config("data=digits", "optimization=ultra", "training.steps=900")
    planned = planned_techniques(short, pickle_parts({"metrics": {}}))
    assert planned["fused_optimizer"] == "engaged"
    for name in ("compile", "whole_step"):
        assert planned[name].startswith("run too short (900 steps; tried from")
    measured = {name for name, plan in planned.items() if plan == "tried"}
    assert not measured & {"compile", "whole_step"} and "recompute" not in planned
