"""Architectures as others write them end in the bits of a plain loop of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner import train
from runner.core.build.setup import Components
from runner.core.data.user_dataset import UserDataset
from runner.core.objectives.custom import CustomObjective
from runner.core.schemas.data import DataConfig
from runner.core.train.step import step_seed
from tests.runs import differences, opened

STEPS, CLASSES = 7, 3


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(6, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.encoder(hidden)[:, 0])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 12, 2, dropout=0.2)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x.t()))[0][-1])


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(sample), mean, log_variance


def vae_loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    x, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return functional.mse_loss(x, target) + 0.1 * divergence


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.branch(x) - self.branch(x.flip(1))).abs())[:, 0]


class MemoryBank(nn.Module):
    """Compares with earlier features, in a queue of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, CLASSES)
        self.register_buffer("bank", torch.ones(32, CLASSES))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        features = functional.normalize(self.encoder(x))
        similar = features @ self.bank.clone().t()
        if self.training:
            rows = (self.position + torch.arange(len(x))) % len(self.bank)
            self.bank[rows] = features.detach()
            self.position += len(x)
        return features + similar.mean(1, keepdim=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(x)).tanh().mean(1))[:, :CLASSES]


class Experts(nn.Module):
    """Each sample goes to one expert; an expert may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in "1234")
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(1).max(1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            output = output.index_copy(0, rows, expert(x[rows]) * weight[rows, None])
        return self.head(x + output)


class Stateful(nn.Module):
    """Has a Python counter, a memory bank in an attribute, and a teacher that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, CLASSES)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.calls, self.bank = 0, [torch.ones(CLASSES)]

    def forward(self, x: Tensor) -> Tensor:
        features = self.student(x)
        if self.training:
            self.calls += 1
            self.bank.append(features.detach().mean(0) / self.calls)
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return features + torch.stack(self.bank).mean(0) + self.teacher(x)


def spectral() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(first, nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def binary_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, (target > 0).float())


Case = tuple[Callable[[], nn.Module], str, Callable[..., Tensor]]
CASES: dict[str, Case] = {
    "BERT": (Bert, "tokens", functional.cross_entropy),
    "LSTM": (Lstm, "tokens", functional.cross_entropy),
    "VAE": (Vae, "itself", vae_loss),
    "siamese": (Siamese, "numbers", binary_loss),
    "memory bank": (MemoryBank, "numbers", functional.cross_entropy),
    "spectral norm": (spectral, "numbers", functional.cross_entropy),
    "tied weights": (Tied, "tokens", functional.cross_entropy),
    "mixture of experts": (Experts, "numbers", functional.cross_entropy),
    "counter, bank and teacher": (Stateful, "numbers", functional.cross_entropy),
}


class Samples:
    sizes = {"task": "classification", "in_features": 8, "classes": CLASSES}

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        if kind == "tokens":
            self.inputs = torch.randint(0, 11, (70, 6), generator=generator)
        else:
            self.inputs = torch.randn(70, 8, generator=generator)
        labels = torch.randint(0, CLASSES, (70,), generator=generator)
        self.targets = self.inputs if kind == "itself" else labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def train_both(name: str, make_optimizer: Any, *level: str) -> tuple[Any, Any]:
    """Two copies of a model, of which a run trained one and a plain loop the other."""
    make, kind, loss = CASES[name]
    samples: Any = Samples(kind)
    if kind == "itself":
        samples.sizes = {"task": "regression", "in_features": 8, "classes": 8}
    torch.manual_seed(1)
    model = make()
    plain = copy.deepcopy(model)
    data = UserDataset(samples, "Samples", DataConfig())
    optimizer = make_optimizer(model.parameters())
    given = Components(model, data, CustomObjective(loss, name), optimizer)
    typed = ("data=cancer", f"training.steps={STEPS}", "training.batch_size=16",
             "training.validate_every=3", "stability.clip_norm=null")  # fmt: skip
    with opened(*typed, *level, given=given) as run:
        batches = list(islice(run.train.batches(0), STEPS))
        seeds = [step_seed(run, number) for number in range(1, STEPS + 1)]
        train(run)
        own = make_optimizer(plain.parameters())  # with as many threads as the run
        plain.train()
        for (inputs, target), seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            own.zero_grad()
            loss(plain(inputs), target).backward()
            own.step()
    return model, plain


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_bit_equal_to_a_plain_loop(name: str) -> None:
    adam = partial(torch.optim.AdamW, lr=1e-2)
    model, plain = train_both(name, adam, "optimization=none")
    assert differences(model.state_dict(), plain.state_dict()) == []


def test_probing_leaves_no_trace_in_a_counter_a_bank_and_a_teacher_at_the_default_level() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    model, plain = train_both("counter, bank and teacher", sgd)
    assert differences(model.state_dict(), plain.state_dict()) == []
    assert model.calls == plain.calls == STEPS
    assert differences(model.bank, plain.bank) == []
