"""Real runs of models with a known fault, captured by the run's own guard, and their replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner import build, compose, train
from runner.core.captures.manifest import list_captures
from runner.core.errors import GaveUp
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.run import Run
from runner.diagnose.replay import job
from runner.diagnose.replay.reopen import Capture, open_capture, reopen_run

HERE = Path(__file__).parent
TRUSTED = ["faulty_models", "seeded_models"]
TRUST = f"security.trusted=[{','.join(TRUSTED)}]"
OVERRIDES = (
    f"{TRUST} device.threads=2 monitoring.progress=false "
    "data._target_=faulty_models.Poisoned data.workers=0 "
    "model._target_=faulty_models.Net training.batch_size=8 training.steps=6 "
    "training.validate_every=6 optimization=none training.sanity=false"
).split()
ROWS = {3, 17, 20, 33, 41, 50}
POISON = f"+data.poison={sorted(ROWS)}".replace(" ", "")
AMP = ("optimization.amp.enabled=true", "optimization.amp.dtype=bf16")

Captured = Callable[..., Path]
"""Trains with some overrides, once a session; the folder of the first capture."""


def capture_first(folder: Path, *overrides: str) -> Path:
    with build(compose([*OVERRIDES, *overrides]), folder) as run, suppress(ValueError, GaveUp):
        train(run)
    return list_captures(folder)[0]


@contextmanager
def opened(path: Path) -> Iterator[tuple[Run, Batch, Capture]]:
    """A capture right before its bad step."""
    capture = open_capture(path)
    with reopen_run(capture, trusted=TRUSTED) as (run, batch):
        yield run, batch, capture


def line_of(mark: str) -> int:
    """The line of faulty_models.py with that comment."""
    lines = (HERE / "faulty_models.py").read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def replay(path: Path, folder: Path, *overrides: str) -> Any:
    """What job=replay makes of a capture."""
    folder.mkdir(exist_ok=True)
    return job.main(compose(["job=replay", f"replay.path={path}", TRUST, *overrides]), folder)
