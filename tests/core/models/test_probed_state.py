"""Probing leaves no trace: a run at the default level is a plain loop, to the bit."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner import train
from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.data.user_dataset import UserDataset
from runner.core.objectives.custom import CustomObjective
from runner.core.schemas.data import DataConfig
from runner.core.train.step import step_seed
from tests.runs import config

STEPS = 5


class Stateful(nn.Module):
    """Has a Python counter, a memory bank in an attribute, and a teacher that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.calls, self.bank = 0, [torch.ones(3)]

    def forward(self, x: Tensor) -> Tensor:
        features = self.student(x)
        if self.training:
            self.calls += 1
            self.bank.append(features.detach().mean(0) / self.calls)
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return features + torch.stack(self.bank).mean(0) + self.teacher(x)  # type: ignore[no-any-return]


class Samples:
    sizes = {"task": "classification", "in_features": 8, "classes": 3}

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.arange(index, index + 8).sin(), index % 3


def test_a_counter_a_bank_and_a_teacher_are_those_of_a_plain_loop_at_the_default_level() -> None:
    torch.manual_seed(1)
    model = Stateful()
    plain, loss = copy.deepcopy(model), functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = UserDataset(Samples(), "Samples", DataConfig())
    given = Components(model, data, CustomObjective(loss, "loss"), optimizer)
    typed = config("data=cancer", f"training.steps={STEPS}", "training.batch_size=16",
                   "device.threads=1", "stability.clip_norm=null")  # fmt: skip
    with build(typed, None, given) as run:
        assert model.calls == 0 and len(model.bank) == 1
        batches: Any = list(islice(run.train.batches(0), STEPS))
        seeds = [step_seed(run, number) for number in range(1, STEPS + 1)]
        train(run)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for (inputs, target), seed in zip(batches, seeds, strict=True):
        torch.manual_seed(seed)
        own.zero_grad()
        loss(plain(inputs), target).backward()
        own.step()
    assert model.calls == plain.calls == STEPS
    assert torch.equal(torch.stack(model.bank), torch.stack(plain.bank))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
