"""optimizer.freeze and optimizer.groups: what is trained, at which rate, and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import build, train
from runner.core.errors import ConfigError
from runner.core.optim.fine_tuning import freeze
from runner.core.optim.optimizer import build_optimizer, find_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import OptimizerConfig, ScheduleConfig, ScheduleKind
from runner.core.schemas.stability import StabilityConfig
from tests import runs
from tests.core.optim import steps
from tests.scale.distributed import processes

GROUPS = [{"match": "3", "lr": 0.1}, {"match": "0.*", "lr": 0.002, "weight_decay": 0.2}]
FROZEN = ["optimizer.freeze=[layers.1,'layers.2.*']", "optimizer.ema=0.9", "schedule=cosine"]
RATES = "optimizer.groups=[{match: layers.5, lr: 5e-3}]"
NOISY = (*runs.NOISY, "training.batch_size=20", *FROZEN, RATES)
pytestmark = pytest.mark.usefixtures("my_package")


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("how", [{"fused": True}, {}], ids=["kernel", "host"])
@pytest.mark.parametrize("kind", [ScheduleKind.cosine, ScheduleKind.constant])
def test_each_group_is_updated_at_its_own_rate_and_decay_as_torch_has_it(
    name: str, how: dict[str, Any], kind: ScheduleKind
) -> None:
    net, twin = steps.net_and_twin()
    config = OptimizerConfig(name=name, lr=0.02, weight_decay=0.1, groups=GROUPS)
    rates = lr_factors(ScheduleConfig(kind), 20)
    optimizer = build_optimizer(config, find_optimizer(name), net, how)
    update = OptimizerStep(net, optimizer, StabilityConfig(clip_norm=None), 0.02, rates)
    known = dict(twin.named_parameters())
    reference = find_optimizer(name)(
        [
            {"params": [known["3.weight"]], "lr": 0.1},
            {"params": [known["3.bias"]], "lr": 0.1, "weight_decay": 0.0},
            {"params": [known["0.weight"]], "lr": 0.002, "weight_decay": 0.2},
            {"params": [known["0.bias"]], "lr": 0.002, "weight_decay": 0.0},
            {"params": [known["1.weight"], known["1.bias"]], "weight_decay": 0.0},
        ],
        lr=0.02,
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda update: rates[min(update, 19)])
    steps.train_beside(net, update, twin, lambda _: (reference.step(), scheduler.step()))


def test_frozen_parts_stay_as_they_are_without_state_and_a_killed_run_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    config = runs.config(*NOISY, "training.steps=12", "checkpoint.every=5", "checkpoint.keep=9")
    with build(config, tmp_path / "whole") as run:
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        summary = train(run)
        frozen = [n for n, p in run.model.named_parameters() if not p.requires_grad]
        assert frozen == ["layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"]
        assert len(run.update.optimizer.state) == len(run.update.average) == 2
        after = run.model.state_dict()
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved == {"layers.5.weight", "layers.5.bias"}  # nor do BatchNorm's statistics
    recorded = {c.key: c.reason for c in summary.choices}
    assert recorded["optimizer.freeze"] == "18 of 90 parameters are trained"
    steps.assert_a_killed_run_ends_in_the_same_bits(config, tmp_path)


@pytest.mark.slow
def test_shards_and_copies_take_frozen_parts_and_rates_as_one_process_does() -> None:
    own = ["data=cancer", "model=mlp", "training.batch_size=150", "training.steps=6"]
    own += ["optimizer.freeze=[layers.0]", "optimizer.groups=[{match: '*.bias', lr: 0.05}]"]
    own += ["stability.clip_norm=0.1", "schedule=cosine", "optimizer.ema=0.9", processes.DOUBLE]
    alone = processes.run_one(*processes.compose_cases({"run": own}, 1)["run"])
    for kind in ("ddp", "fsdp"):
        cases = processes.compose_cases({"run": own}, 2, kind)
        together = processes.run_together(2, cases)[0]["run"]
        assert (alone.error, together.error) == ("", ""), kind
        assert together.same and together.moved == 0
        distances = processes.distances(together, alone)
        assert max(distances.values()) < 1e-7, distances


def test_names_that_match_nothing_are_errors_with_the_near_ones() -> None:
    net = nn.ModuleDict({"bert": nn.ModuleDict({"embeddings": nn.Embedding(3, 2)})})
    net["classifier"] = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"optimizer.freeze: 'embedings.\*'.* mean .*embeddings"):
        freeze(net, ["embedings.*"])
    with pytest.raises(ConfigError, match="leaves none of 3 parameters"):
        freeze(net, ["*"])
    net.requires_grad_(True)
    freeze(net, ["embeddings.*"])  # within bert
    assert [p.requires_grad for p in net.parameters()] == [False, True, True]
    config = OptimizerConfig(groups=[{"match": "embeddings", "lr": 0.1}])
    with pytest.raises(ConfigError, match="groups.0.match: 'embeddings' matches none of 2 trained"):
        build_optimizer(config, torch.optim.AdamW, net, {})


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ("{lr: 1}", "optimizer.groups.0: needs match and an option"),
        ("{match: a}", "optimizer.groups.0: needs match and an option"),
        ("{match: a, rate: 1}", "optimizer.groups.0.rate: no such key"),
        ("{match: a, lr: -1}", "optimizer.groups.0.lr: must be a number ≥ 0"),
        ("{match: a, lr: 1}", "optimizer.lr: is 0"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_by_its_key(group: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        runs.config("optimizer.lr=0", f"optimizer.groups=[{group}]")
