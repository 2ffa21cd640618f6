"""Whether a run that is cut off half-way and resumed is bit-equal to one that never stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from runner.build import build
from runner.config import RunConfig
from runner.training.hook import Hook, Step, Verdict
from runner.training.loop import train
from runner.training.run import Run

STEPS = 20
ROWS = ("train", "val")  # of metrics.jsonl; the others are about the machine


@dataclass(frozen=True)
class Continuation:
    """The comparison of an uninterrupted run with a resumed one."""

    steps: int
    cut: int  # the step after which the resumed run was cut off
    compared: dict[str, int]  # values by kind
    differing: list[str]  # names of those that are not bit-equal; the first is computed first
    techniques: list[str]

    @property
    def exact(self) -> bool:
        """Whether every bit is the same."""
        return not self.differing


def continuation(config: RunConfig, folder: Path, steps: int = STEPS) -> Continuation:
    """Train `steps` steps at a stretch, and again with a checkpoint and a new start half-way.

    Compares the rows of metrics.jsonl, weights, buffers, optimizer state, averages and the loss
    scale. Both runs are recorded in a temporary folder inside `folder`.
    """
    config, cut = _shorten(config, steps), steps // 2
    with TemporaryDirectory(dir=folder, prefix="verify-") as place:
        once, twice = Path(place) / "once", Path(place) / "twice"
        with build(config, once) as run:
            train(run)
            whole = dict(_values(run, once))
        with build(config, twice) as run:
            run.hooks.append(_StopAfter(cut))
            train(run)
        config.checkpoint.resume = "auto"
        with build(config, twice) as run:
            train(run)
            resumed = dict(_values(run, twice))
            techniques = [name for name, _ in run.techniques]
    keys = dict.fromkeys([*whole, *resumed])
    differing = [
        f"{kind} {name}"
        for kind, name in keys
        if not _equal(whole.get((kind, name)), resumed.get((kind, name)))
    ]
    return Continuation(steps, cut, dict(Counter(kind for kind, _ in keys)), differing, techniques)


def _shorten(config: RunConfig, steps: int) -> RunConfig:
    """The same run with its checkpoints and validations within so many steps."""
    config = deepcopy(config)
    training = config.training
    training.steps, training.epochs, training.patience = steps, None, None
    training.validate_every = max(1, steps // 4)
    config.checkpoint.enabled, config.checkpoint.resume = True, "none"
    config.checkpoint.every = None
    config.monitoring.progress = False
    config.monitoring.every = 3  # the cut falls into a window whose numbers are not yet written
    return config


class _StopAfter(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, step: Step) -> Verdict:
        return Verdict.STOP if step.number >= self.step else Verdict.KEEP


def _values(run: Run, folder: Path) -> Iterator[tuple[tuple[str, str], Any]]:
    """All that has to be the same, in about the order in which it is computed."""
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["split"] in ROWS:
            where = f"at step {row['step']}"
            yield from ((("metric", f"{row['split']}/{k} {where}"), v) for k, v in row.items())
    parameters = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    for name, value in run.model.state_dict().items():
        yield ("parameter" if name in parameters else "buffer", name), value
    yield from _leaves(run.update.state(), "")


def _leaves(value: Any, path: str) -> Iterator[tuple[tuple[str, str], Any]]:
    """All values of nested containers, by their paths."""
    if not isinstance(value, Mapping | list | tuple):
        yield ("optimizer", path), value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _equal(a: Any, b: Any) -> bool:
    """Bit by bit, so that NaN is itself and -0 is not 0."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)
