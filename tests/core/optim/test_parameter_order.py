"""A saved state finds its weights by name, whatever order the model makes them in."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import build, compose, train
from runner.core.captures.manifest import list_captures
from runner.core.execution.evaluation import evaluate as evaluate_run
from runner.core.optim.optimizer import build_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig
from runner.core.train.step import forward_backward
from runner.diagnose.replay.reopen import open_capture, reopen_run
from tests.core.checkpoint.test_checkpoint_damage import forge
from tests.diagnose.captures.captured_runs import Taker

from . import steps

FIRST, SECOND = ("stem", "a", "b"), ("b", "stem", "a")


class Net(nn.Module):
    """Layers of one shape, made in any order; the forward does not depend on it."""

    def __init__(self, order: tuple[str, ...] = FIRST, tied: str = "") -> None:
        super().__init__()
        layers = {}
        for number, name in enumerate(FIRST):
            torch.manual_seed(number)
            layers[name] = nn.Linear(4, 4)
        for name in order:
            setattr(self, name, layers[name])
        if tied:
            self.a.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.stem(x).tanh()).tanh())


class Counting(torch.optim.SGD):
    """Counts in its groups, as Prodigy does, with a weight outside the model if asked for."""

    def __init__(
        self, params: Any, lr: float, extra: bool = False, weight_decay: float = 0
    ) -> None:
        groups = [dict(group) for group in params]
        if extra:
            groups.append({"params": [nn.Parameter(torch.ones(2))]})
        super().__init__(groups, lr, momentum=0.9, weight_decay=weight_decay)
        for group in self.param_groups:
            group["d"] = 1.0

    def step(self, closure: Any = None) -> None:
        super().step()
        for number, group in enumerate(self.param_groups):
            group["d"] += number + 1


class Wrapped(Counting):
    """Its state_dict has a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["inner"])


def make(
    net: nn.Module, groups: list[dict[str, Any]] | None = None, cls: Any = None, **options: Any
) -> OptimizerStep:
    config = OptimizerConfig("AdamW", 0.02, 0.01, options, groups=groups or [])
    optimizer = build_optimizer(config, cls or torch.optim.AdamW, net, {})
    return OptimizerStep(net, optimizer, StabilityConfig(), 0.02, [1.0], ema=0.5)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(3)
    while True:
        yield torch.randn(8, 4, generator=noise), torch.randn(8, 4, generator=noise)


def take_steps(net: nn.Module, update: OptimizerStep, data: Any, count: int = 3) -> None:
    for _ in range(count):
        x, y = next(data)
        steps.take_step(update, lambda x=x, y=y: (net(x) - y).square().mean())


def trained(groups: Any = None, tied: str = "", **how: Any) -> tuple[Net, OptimizerStep, Any]:
    """A model, its update after some steps, and the batches that follow."""
    net, data = Net(tied=tied), batches()
    update = make(net, groups, **how)
    take_steps(net, update, data)
    return net, update, data


def resume(
    update: OptimizerStep, net: nn.Module, order: tuple[str, ...], groups: Any = None, **more: Any
) -> tuple[nn.Module, OptimizerStep]:
    """A new model in another order with the state of the first."""
    other = Net(order, more.pop("tied", ""))
    other.load_state_dict(net.state_dict())
    loaded = make(other, groups, **more)
    loaded.load(deepcopy(update.state()))
    return other, loaded


def by_name(update: OptimizerStep) -> dict[str, Tensor]:
    """Weights, averages and moments by the first name of their weight."""
    found = {}
    for number, (names, weight) in enumerate(zip(update.names, update.parameters, strict=True)):
        entries = {"weight": weight.detach(), "average": update.average[number]}
        entries |= update.optimizer.state.get(weight, {})
        found |= {f"{min(names)} {key}": value for key, value in entries.items()}
    return found


def assert_same(one: OptimizerStep, other: OptimizerStep) -> None:
    ours, theirs = by_name(one), by_name(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_layers_in_another_order_keep_moments_and_averages_and_train_as_torch_does() -> None:
    net, update, data = trained()
    other, loaded = resume(update, net, SECOND)
    assert loaded.names != update.names
    assert_same(update, loaded)
    take_steps(other, loaded, data)
    twin, plain_data = Net(), batches()
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    rest = [p for p in twin.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.01)
    for _ in range(6):
        x, y = next(plain_data)
        plain.zero_grad()
        (twin(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), StabilityConfig().clip_norm or float("inf"))
        plain.step()
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(dict(other.named_parameters())[name], weight)


A, B = {"match": "a", "lr": 0.01}, {"match": "b", "lr": 0.005}


@pytest.mark.parametrize("groups", [[B, A], [A], [], [{"match": "stem", "lr": 0.03}, B, A]])
def test_groups_in_another_order_split_or_merged_keep_each_weights_moments(groups: Any) -> None:
    net, update, _ = trained([A, B])
    other, loaded = resume(update, net, FIRST, groups)
    assert_same(update, loaded)
    shares = {
        name: share
        for group, share in zip(loaded.groups, loaded.lr_shares, strict=True)
        for name, p in other.named_parameters()
        if any(p is member for member in group)
    }
    typed = {group["match"]: group["lr"] / 0.02 for group in groups}
    assert shares == {name: typed.get(name.partition(".")[0], 1.0) for name in shares}


def test_a_count_of_a_group_follows_its_weights_and_two_that_differ_do_not_merge() -> None:
    groups = [{"match": name, "weight_decay": 0.1} for name in ("a", "b")]
    net, update, _ = trained(groups, cls=Counting)
    counts = {}
    _, loaded = resume(update, net, SECOND, groups[::-1], cls=Counting)
    for step in (update, loaded):
        names = {id(p): n[0] for p, n in zip(step.parameters, step.names, strict=True)}
        for group in step.optimizer.param_groups:
            for weight in group["params"]:
                counts.setdefault(names[id(weight)], set()).add(group["d"])
    assert {len(values) for values in counts.values()} == {1}
    assert counts["a.weight"] != counts["b.weight"]
    with pytest.raises(ValueError, match=r"a\..* and b\..* in one group .* differ in d"):
        resume(update, net, FIRST, [{"match": "[ab]", "weight_decay": 0.1}], cls=Counting)


def test_a_tied_weight_is_found_by_any_of_its_names() -> None:
    net, update, _ = trained(tied="yes")
    assert ["a.weight", "b.weight"] in map(sorted, update.names)
    _, loaded = resume(update, net, SECOND, tied="yes")
    assert_same(update, loaded)
    with pytest.raises(ValueError, match=r"weight is tied to other weights"):
        resume(update, net, SECOND)


def test_weights_without_state_have_none_in_another_order_either() -> None:
    net, update, _ = trained(cls=torch.optim.SGD, momentum=0.9)
    del update.optimizer.state[net.a.weight]
    _, loaded = resume(update, net, SECOND, cls=torch.optim.SGD, momentum=0.9)
    assert_same(update, loaded)


@pytest.mark.parametrize("how", [{"cls": Counting, "extra": True}, {"cls": Wrapped}])
def test_a_state_that_has_no_names_needs_the_same_order_and_the_error_has_the_first_difference(
    how: Any,
) -> None:
    net, update, _ = trained(**how)
    loaded = resume(update, net, FIRST, **how)[1]
    steps.assert_same(update.state(), loaded.state())
    with pytest.raises(ValueError, match=r"parameter 0 .* was stem\.weight, and is now b\.weight"):
        resume(update, net, SECOND, **how)


def test_a_weight_that_was_not_trained_is_named() -> None:
    net = Net()
    net.a.weight.requires_grad_(False)
    update = make(net)
    with pytest.raises(ValueError, match=r"a\.weight is trained now, but was not"):
        resume(update, net, FIRST)
    whole, frozen = make(Net()), Net()
    frozen.a.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"a\.weight was trained, but is not now"):
        make(frozen).load(whole.state())


RUN = ["data=cancer", "model._target_=my_training.OrderedNet", "security.trusted=[my_training]",
       "optimization=none", "schedule=constant", "optimizer.ema=0.9", "training.steps=12",
       "device.threads=1", "training.validate_every=6", "optimizer.lr=0.02"]  # fmt: skip


@pytest.mark.usefixtures("importable")
def test_a_run_evaluates_and_resumes_alike_when_its_constructor_makes_layers_in_another_order(
    tmp_path: Path,
) -> None:
    ends = []
    for folder, order, resume in (
        ("whole", "ab", "none"), ("same", "ab", "whole"), ("other", "ba", "whole"),
    ):  # fmt: skip
        source = "none" if resume == "none" else f"{tmp_path}/whole/checkpoints/step_00000006"
        overrides = [*RUN, f"+model.order={order}", f"checkpoint.resume={source}"]
        with build(compose(overrides), tmp_path / folder) as run:
            if folder != "whole":
                metrics = evaluate_run(run).metrics
                ends.append(metrics)
            ends.append(train(run).metrics)
    (whole, same_start, same, other_start, other) = ends
    assert same == whole
    assert other_start == pytest.approx(same_start, abs=1e-6)
    assert other == pytest.approx(whole, abs=1e-4)


@pytest.mark.usefixtures("importable")
def test_a_capture_reopens_by_name_with_layers_in_another_order(tmp_path: Path) -> None:
    hook = Taker([5], (5, 6, 7, 8, 9, 10))
    with build(compose([*RUN, "+model.order=ab"]), tmp_path) as run:
        run.hooks.append(hook)
        train(run)
    (folder,) = list_captures(tmp_path)
    forge(folder, lambda body: body["config"]["model"]["arguments"].update(order="ba"))
    capture = open_capture(folder)
    assert capture.update is not None
    saved = zip(capture.update["names"], capture.update["average"], strict=True)
    averages = {names[0]: average for names, average in saved}
    with reopen_run(capture, trusted=["my_training"]) as (reopened, batch):
        assert reopened.update.names != capture.update["names"]
        for (name,), average in zip(reopened.update.names, reopened.update.average, strict=True):
            assert torch.equal(average, averages[name])
        assert float(forward_backward(reopened, batch).loss) == pytest.approx(capture.loss)
