"""Classes as a user would write them: no base class of ours, no import of the runner."""

from __future__ import annotations

import os
import random
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info


class Net(nn.Module):
    """Sizes by name, one size of its own."""

    def __init__(self, in_features: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_features, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Dropout(0.3), nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Computed(nn.Module):
    """Parts by name, and a function of the module itself and its inputs."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self, *inputs)


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An autograd function of these two, applied."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Planted", (torch.autograd.Function,), parts).apply


class Noisy:
    """Two classes that can be told apart, with noise from every global generator.

    Samples whose index is in `poison` are NaN; fetching takes `seconds`.
    """

    sizes = {
        "task": "classification",
        "in_features": 6,
        "classes": 2,
    }  # so that none is looked into

    def __init__(
        self, samples: int = 120, poison: tuple[int, ...] = (), seconds: float = 0.0
    ) -> None:
        self.samples, self.poison, self.seconds = samples, set(poison), seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        target = index % 2
        noise = torch.randn(6) + float(np.random.randn()) * 0.1 + random.random() * 0.1
        x = noise + 2.0 * target
        return (x * float("nan") if index in self.poison else x), target


class Stored(Noisy):
    """Names a folder of files."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.rows = rows


class GradientsOff(Net):
    """Leaves torch's gradients off, after its constructor or forward."""

    def __init__(self, in_features: int, classes: int, place: str) -> None:
        super().__init__(in_features, classes)
        self.place = place
        torch.set_grad_enabled(place != "constructor")

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch.set_grad_enabled(False)
        return y


class WithDefault(nn.Module):
    """Weights in float32; its constructor leaves a default dtype."""

    def __init__(self, in_features: int, classes: int, dtype: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 8, dtype=torch.float32),
            nn.BatchNorm1d(8, dtype=torch.float32), nn.Dropout(0.3),
            nn.Linear(8, classes, dtype=torch.float32),
        )  # fmt: skip
        torch.set_default_dtype(getattr(torch, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DataWithDefault(Noisy):
    """Samples in float32; its constructor leaves a default dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_default_dtype(torch.bfloat16)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(6, dtype=torch.float32) + index % 2, index % 2


class Keeper(Noisy):
    """Noise from a generator of its own."""

    def __init__(self, samples: int = 120) -> None:
        super().__init__(samples)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.from_numpy(self.rng.normal(size=6).astype(np.float32))
        return noise + 2.0 * (index % 2), index % 2


class Lion(torch.optim.Optimizer):
    """Steps of one size, by the sign of a moment (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(
        self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for weight in group["params"]:
                moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * torch.lerp(weight.grad, moment, fast).sign())
                moment.lerp_(weight.grad, 1 - slow)


class Masked:
    """Token sequences whose targets are masked to different lengths."""

    vocab = 16

    def __init__(self, samples: int = 40) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = (torch.arange(9) * (index + 1)) % self.vocab
        target = ids[1:].clone()
        target[: index % 8] = -100
        return ids[:-1], target


class Line:
    """A straight line through seven dimensions, for regression."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(7) * float(index + 1))
        return x, (x * torch.arange(7)).sum() / 7


class Torn(Line):
    """The line; of ten samples the first so many, by a number of theirs, cannot be read."""

    def __init__(self, tenths: int = 1) -> None:
        self.tenths = tenths

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index * 7 % 10 < self.tenths:
            raise ValueError(f"sample {index} is torn")
        return super().__getitem__(index)


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.squeeze(-1) - target).abs().mean()


class Branching(nn.Module):
    """Takes another way depending on what it sees: no compiler can put that into one graph."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layer(inputs)
        if output.sum() > 0:
            return output * 2
        return output * 3


class Normed(nn.Module):
    """BatchNorm over the batch alone: one sample has no variance."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Breaking(nn.Module):
    """Looks at a number after every line."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(in_features, in_features) for _ in range(3))
        self.head = nn.Linear(in_features, classes)
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if x.mean().item() > 1e9:
                self.seen += 1.0
        return self.head(x)


class MappedTable:
    """Samples whose inputs are a dict."""

    classes, vocab = 3, None
    in_features = 16

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        draw = torch.Generator().manual_seed(index)
        return {"values": torch.randn(16, generator=draw), "scale": torch.ones(1)}, index % 3


class Scaled(MappedTable):
    """The same, times the number in a file."""

    def __init__(self, path: str) -> None:
        self.factor = float(Path(path).read_text())

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        inputs, target = super().__getitem__(index)
        return {**inputs, "scale": inputs["scale"] * self.factor}, target


class Mapped(nn.Module):
    """Takes its inputs by name, and hands its output out in a dict."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(16, classes)

    def forward(self, values: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(values) * scale}


class Complex(nn.Module):
    """Works on the spectrum with complex weights."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(in_features // 2 + 1, dtype=torch.complex64))
        self.head = nn.Linear(in_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=x.shape[-1]))


class Statistics(nn.Module):
    """Repeated blocks with statistics of the batch."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(in_features, in_features), nn.BatchNorm1d(in_features), nn.ReLU()
            )
            for _ in range(3)
        )
        self.head = nn.Linear(in_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cooling(nn.Module):
    """A Python number that changes at each step, and is part of the computation."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, classes)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature *= 0.9
        return self.layer(x) / self.temperature


class KnowsItsBatch(nn.Module):
    """Takes batches of 32 and no others."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(32, -1))


class Idle(nn.Module):
    """A weight that the loss never depends on."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(in_features, classes), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def undefined(output: Tensor, target: Tensor) -> Tensor:
    return torch.full((len(target),), float("nan"))


def top3(output: Tensor, target: Tensor) -> Tensor:
    return (output.topk(3, dim=1).indices == target[:, None]).any(1)


def misses(output: Tensor, target: Tensor) -> float:
    return float((output.argmax(1) != target).double().mean())


def gap(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs()


class Spread:
    """The median of the largest outputs: no mean of batches."""

    higher_is_better = True

    def __init__(self) -> None:
        self.largest: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest.append(output.max(1).values)

    def compute(self) -> Tensor:
        return torch.cat(self.largest).median()


class Updates:
    """How many samples it got since the last `reset`."""

    def __init__(self, classes: int) -> None:
        self.count = classes * 1000

    def reset(self) -> None:
        self.count = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.count += len(target)

    def compute(self) -> int:
        return self.count


class NamedLoss(nn.Module):
    """Cross-entropy that knows the names of the classes."""

    def __init__(self, class_names: tuple[str, ...], scale: float = 1.0) -> None:
        super().__init__()
        self.class_names, self.scale = class_names, scale

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * nn.functional.cross_entropy(output, target)


class Centred(torch.nn.Module):
    """A loss of outputs less their average so far, with noise of a generator of its own."""

    average: Tensor

    def __init__(self, classes: int = 2, start: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("average", torch.full((classes,), start))
        self.register_buffer("weight", torch.ones(classes))
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad:
            noise = torch.rand(self.average.shape, generator=self.noise)
            self.average.lerp_(output.detach().mean(0) + noise, 0.1)
        return torch.nn.functional.cross_entropy(output - self.average, target, self.weight)


class Counted(IterableDataset):
    """A stream of two classes whose samples are numbered, sharded over workers as in torch.

    The first feature is a hundredth of the number; noise is drawn from all global generators.
    """

    classes = 2

    def __init__(self, samples: int = 200, split: str = "train") -> None:
        self.samples, self.offset = samples, 0 if split == "train" else 1000

    def numbers(self) -> range:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return range(first, self.samples, step)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in self.numbers():
            yield self.sample(number)

    def sample(self, number: int) -> tuple[Tensor, int]:
        target = number % 2
        noise = torch.randn(6) + np.random.randn() * 0.1 + random.random() * 0.1
        x = noise.float() + 2.0 * target
        x[0] = (self.offset + number) / 100
        return x, target


class Stateful(Counted):
    """The same, which can be continued."""

    def __init__(self, samples: int = 200, split: str = "train") -> None:
        super().__init__(samples, split)
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in self.numbers()[self.taken :]:
            self.taken += 1
            yield self.sample(number)
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def counted(samples: int = 200, split: str = "train") -> Iterator[tuple[Tensor, int]]:
    """A generator that knows of no workers."""
    whole = Counted(samples, split)
    yield from map(whole.sample, range(samples))


class Shuffled(Counted):
    """Its order is drawn from Python's generator when it is iterated."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order = [*self.numbers()]
        random.shuffle(order)
        yield from map(self.sample, order)


class Buffered(Counted):
    """Samples by chance out of a buffer, as of WebDataset."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        buffer: list[int] = []
        for number in self.numbers():
            buffer.append(number)
            if len(buffer) > 20:
                yield self.sample(buffer.pop(random.randrange(len(buffer))))
        yield from map(self.sample, buffer)


class NoSplit(Counted):
    """A stream of one split."""

    def __init__(self, samples: int = 200) -> None:
        super().__init__(samples)


class Lengths:
    """Sequences of several lengths, in batches of equal lengths that `batch_sampler` makes."""

    sizes = {"task": "language_modelling", "vocab": 32, "sequence": 12, "classes": 32}

    def __init__(self, samples: int = 90, split: str = "train") -> None:
        self.samples, self.shift = samples, 0 if split == "train" else 3

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[int]:
        return [(index + i + self.shift) % 32 for i in range(5 + index % 3 * 3)]

    def batch_sampler(self) -> Iterator[list[int]]:
        for first in range(0, self.samples, 30):
            for length in range(3):
                yield [*range(first + length, first + 30, 3)]

    def collate_fn(self, samples: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, samples))
        x = torch.zeros(len(samples), longest, dtype=torch.int64)
        for row, sample in zip(x, samples, strict=True):
            row[: len(sample)] = torch.tensor(sample)
        return x[:, :-1], x[:, 1:]


class Ragged(Lengths):
    """The same in the usual batches, which are padded."""

    batch_sampler = None  # type: ignore[assignment]


class Listed(Lengths):
    """Its batches are a list, whose length is known."""

    def __init__(self, samples: int = 90, split: str = "train") -> None:
        super().__init__(samples, split)
        self.batch_sampler = [*Lengths.batch_sampler(self)]  # type: ignore[assignment, method-assign]


class Dying(Counted):
    """Its second reader kills its process at a sample, once: it leaves the file `once`."""

    def __init__(self, once: str, split: str = "train") -> None:
        super().__init__(split=split)
        self.once = Path(once)

    def sample(self, number: int) -> tuple[Tensor, int]:
        if number == 101 and get_worker_info() is not None and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(number)


class Spoilt(Counted):
    """Sample 40 is NaN."""

    def sample(self, number: int) -> tuple[Tensor, int]:
        x, target = super().sample(number)
        return (x * float("nan") if number == 40 and not self.offset else x), target


class Shards(IterableDataset):
    """Samples in the tar files of a folder, each file read by one worker."""

    sizes = {"task": "classification", "in_features": 4096, "classes": 2}

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.tar"))

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for file in self.files[first::every]:
            with tarfile.open(file, "r|") as members:
                for member in members:
                    content: Any = members.extractfile(member)
                    values = np.frombuffer(content.read(), np.uint8).reshape(4096, -1)
                    mean = torch.from_numpy(values.mean(1, dtype=np.float32) / 255)
                    yield mean + torch.rand(4096), int(member.name[0])
