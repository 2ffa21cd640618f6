"""optimizer.groups with a name: several optimizers in one run, beside torch's stepped by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import build, train
from runner.core.errors import CheckpointError, ConfigError
from runner.core.optim.combined import CombinedOptimizer, build_combined
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import OptimizerConfig, ScheduleConfig, ScheduleKind
from runner.core.schemas.stability import StabilityConfig
from tests import runs
from tests.core.optim import steps
from tests.core.optim.steps import net_and_twin

MUON = {"match": "*.weight", "name": "Muon", "lr": 0.05, "options": {"momentum": 0.9}}
TYPED = "optimizer.groups=[{match: 'layers.*.weight', name: Muon, lr: 0.02}]"
SHORT = ("data=cancer", "model=mlp", "training.steps=12", "schedule=cosine", "optimizer.ema=0.9")


def combined(net: nn.Module, groups: list[dict[str, Any]], **own: Any) -> CombinedOptimizer:
    """The optimizer of a config with these groups, AdamW at 0.02 for the rest."""
    config = OptimizerConfig(lr=0.02, weight_decay=0.1, groups=groups, **own)
    return build_combined(config, torch.optim.AdamW, net)[0]


@pytest.mark.parametrize("kind", [ScheduleKind.cosine, ScheduleKind.constant])
@pytest.mark.parametrize(
    ("group", "clip"),
    [
        (MUON, None),  # its 16 bits turn the last bit of a clipped gradient into 0.3 %
        ({**MUON, "name": "SGD"}, 0.5),
    ],
    ids=["Muon", "SGD, clipped"],
)
def test_two_optimizers_train_as_both_stepped_by_hand_under_one_schedule_and_clip_norm(
    kind: ScheduleKind, group: dict[str, Any], clip: float | None
) -> None:
    net, twin = net_and_twin()
    rates = lr_factors(ScheduleConfig(kind), 20)
    update = OptimizerStep(
        net, combined(net, [group]), StabilityConfig(clip_norm=clip), 0.02, rates
    )
    known = dict(twin.named_parameters())
    by_name = [p for n, p in known.items() if n in ("0.weight", "3.weight")]
    vectors = [p for p in known.values() if p.ndim == 1]
    if group["name"] == "SGD":  # it takes the norm's weight, too, without decay
        vectors = [p for p in vectors if p is not known["1.weight"]]
        by_name.append(known["1.weight"])
    cls = getattr(torch.optim, group["name"])
    decays = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in by_name]
    by_hand: list[torch.optim.Optimizer] = [
        cls(decays, lr=0.05, momentum=0.9),
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.0),
    ]

    def step_by_hand(number: int) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        for optimizer, rate in zip(by_hand, (0.05, 0.02), strict=True):
            for own in optimizer.param_groups:
                own["lr"] = rate * rates[number]
            optimizer.step()

    steps.train_beside(net, update, twin, step_by_hand)


def test_a_batch_that_is_not_finite_changes_the_weights_and_state_of_neither() -> None:
    net, _ = net_and_twin()
    update = OptimizerStep(net, combined(net, [MUON]), StabilityConfig(), 0.02, [1.0] * 9)
    good, bad = steps.batches(2)
    steps.step(net, update, good)
    before = copy.deepcopy([net.state_dict(), update.optimizer.state_dict()])
    assert steps.step(net, update, bad, beside=float("nan"))[1]
    steps.assert_same(before, [net.state_dict(), update.optimizer.state_dict()])


def test_weights_that_the_named_class_does_not_take_go_to_the_rest_and_it_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, _ = net_and_twin()
    config = OptimizerConfig(groups=[MUON])
    optimizer, notes = build_combined(config, torch.optim.AdamW, net)
    named = {id(p): name for name, p in net.named_parameters()}
    by_class = {
        type(part).__name__: {named[id(p)] for g in part.param_groups for p in g["params"]}
        for part in optimizer.combined_parts
    }
    assert by_class["Muon"] == {"0.weight", "3.weight"}
    assert by_class["AdamW"] == {"0.bias", "1.weight", "1.bias", "3.bias"}
    assert [(n.key, n.value) for n in notes] == [("optimizer.groups.0", "2 of 3 weights")]
    assert "Muon takes no weight of shape [8]: 1.weight is left to others" in caplog.text


def test_sparse_gradients_have_their_own_optimizer_beside_a_dense_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3, bias=False))
    twin, x, y = copy.deepcopy(net), torch.randint(0, 20, (16,)), torch.randint(0, 3, (16,))
    optimizer = combined(net, [{"match": "0", "name": "SparseAdam", "lr": 0.1}])
    optimizer.param_groups[0]["lr"] = 0.1  # else the OptimizerStep sets it
    by_hand = [
        torch.optim.SparseAdam(twin[0].parameters(), lr=0.1),
        torch.optim.AdamW(twin[1].parameters(), lr=0.02, weight_decay=0.1),
    ]
    for model, optimizers in ((net, [optimizer]), (twin, by_hand)):
        for _ in range(3):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for one in optimizers:
                one.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_killed_run_with_two_optimizers_ends_in_the_same_bits(tmp_path: Path) -> None:
    config = runs.config(*SHORT, TYPED, "checkpoint.every=5", "checkpoint.keep=9")
    with build(config, tmp_path / "whole") as run:
        assert isinstance(run.update.optimizer, CombinedOptimizer)
        train(run)
    steps.assert_a_killed_run_ends_in_the_same_bits(config, tmp_path)


@pytest.mark.parametrize("groups", ["[]", "[{match: layers.*.weight, name: SGD}]"])
def test_the_state_of_other_optimizers_is_refused(tmp_path: Path, groups: str) -> None:
    runs.trained(*SHORT, TYPED, folder=tmp_path)
    resumed = (*SHORT, f"optimizer.groups={groups}", "training.steps=14", "checkpoint.resume=auto")
    with pytest.raises((CheckpointError, ConfigError), match="optimizer"):
        runs.trained(*resumed, folder=tmp_path)


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"name": "Muonn"}, "optimizer.groups.0.name: .*did you mean Muon"),
        ({"name": 3}, "optimizer.groups.0.name: must be the name of a class"),
        ({"name": "SGD", "options": 3}, "optimizer.groups.0.options: must be arguments by name"),
        (
            {"name": "Muon", "options": {"betas": [0.9, 0.9]}},
            "optimizer.groups.0.options.betas: Muon has no such option",
        ),
        (
            {"name": "SGD", "options": {"lr": 1.0}},
            "optimizer.groups.0.options.lr: has its own key; use optimizer.groups.0.lr",
        ),
        (
            {"name": "SGD", "options": {"momentum": -1.0}},
            "optimizer.groups.0.options.momentum: is not for SGD: Invalid momentum",
        ),
        ({"name": "LBFGS"}, "optimizer.groups.0: LBFGS runs the model several times"),
        ({"name": "SparseAdam"}, "optimizer.groups.0: SparseAdam needs sparse gradients"),
        ({"match": "*.bias", "name": "Muon"}, "optimizer.groups.0: Muon: Muon only supports 2D"),
        ({"match": "head", "name": "Muon"}, "optimizer.groups.0.match: 'head' matches none"),
    ],
)
def test_a_group_whose_optimizer_cannot_be_made_is_refused_by_its_key(
    group: dict[str, Any], problem: str
) -> None:
    net, _ = net_and_twin()
    with pytest.raises(ConfigError, match=problem):
        combined(net, [{"match": "*.weight", **group}])
