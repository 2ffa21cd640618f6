"""Small real runs in which one thing goes wrong at a step of one's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from runner import Hook, Summary, build, compose, train
from runner.core.interfaces.run import Run
from tests.runs import debug_file

OURS = """
    security.trusted=[my_package] device.threads=1 monitoring.progress=false optimization=basic
    training.validate_every=1000 schedule=constant data.workers=0 training.batch_size=20
    stability.watch.slower=null stability.watch.cpu_above=null
    """.split()
LINE = [*OURS, "data._target_=my_package.Line", "model=mlp", "model.width=8", "optimizer.lr=0.01"]
NOISY = [*OURS, "data._target_=my_package.Noisy", "model._target_=my_package.Net"]
WATCHFUL = [
    f"stability.spike.{key}"
    for key in ("at_least=10", "window=20", "threshold=5", "ratio=3", "floor=0")
]

Change = Callable[[Tensor], Tensor]


def louder(output: Tensor) -> Tensor:
    """The output as it is, with a gradient a million times as large."""
    return output + (output * 1e6 - (output * 1e6).detach())


@contextmanager
def faulty(
    overrides: list[str], folder: Path | None = None, at: Mapping[int, Change] | None = None
) -> Iterator[Run]:
    """A run whose model puts out something else at some steps of its training."""
    with build(compose(overrides), folder) as run:
        whole = run.forward

        def forward(*inputs: Any) -> Tensor:
            output: Tensor = whole(*inputs)
            change = (at or {}).get(run.progress.step + 1) if run.model.training else None
            return output if change is None else change(output)

        run.forward = forward
        yield run


def train_faulty(
    overrides: list[str], folder: Path | None, at: Mapping[int, Change], *hooks: Hook
) -> Summary:
    """The summary of such a run that was trained to its end."""
    with faulty(overrides, folder, at) as run:
        run.hooks += hooks
        return train(run)


def anomalies(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = debug_file(folder, "anomalies")["anomalies"]
    return found
