"""Real runs of models with a known fault, captured by the run's own guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from runner import build, compose, train
from runner.captures.manifest import captures
from runner.captures.reader import Capture, open_capture
from runner.data.batch import Batch
from runner.replay.reopen import reopened
from runner.training.run import Run

HERE = Path(__file__).parent
TRUSTED = ["faulty_models"]
OVERRIDES = (
    "security.trusted=[faulty_models] device.threads=2 monitoring.progress=false "
    "data._target_=faulty_models.Poisoned data.workers=0 "
    "model._target_=faulty_models.Net training.batch_size=8 training.steps=6 "
    "training.validate_every=6 optimization=none"
).split()
POISON = "+data.poison=[3,17,20,33,41,50]"

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def captured(tmp_path: Path) -> Make:
    """Trains with these overrides; the folder of its first capture."""

    def make(*overrides: str) -> Path:
        folder = tmp_path / "run"
        with build(compose([*OVERRIDES, *overrides]), folder) as run, suppress(ValueError):
            train(run)
        return captures(folder)[0]

    return make


@pytest.fixture
def standing() -> Callable[..., object]:
    """Opens a capture right before its bad step."""

    @contextmanager
    def stand(path: Path, *without: str) -> Iterator[tuple[Run, Batch, Capture]]:
        capture = open_capture(path)
        with reopened(capture, trusted=TRUSTED, without=without) as (run, batch):
            yield run, batch, capture

    return stand


def line_of(mark: str) -> int:
    """The line of faulty_models.py with that comment."""
    lines = (HERE / "faulty_models.py").read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


@pytest.fixture
def marked() -> Callable[[str], int]:
    return line_of
