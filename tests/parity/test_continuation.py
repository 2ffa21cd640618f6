"""A run that goes on in the same bits is told from one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import compose
from runner.parity.continuation import continuation

QUIET = ["device=cpu", "device.threads=1", "monitoring.progress=false"]


@pytest.fixture(autouse=True)
def _mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=cnn", "model.width=8", "model.stages=2", "optimizer.ema=0.9", "optimization=basic"],
        ["model.dropout=0.2", "optimization=amp", "optimization.amp.dtype=fp16"],
    ],
)
def test_a_run_that_is_cut_off_goes_on_in_the_same_bits(
    tmp_path: Path, overrides: list[str]
) -> None:
    found = continuation(compose([*QUIET, *overrides]), tmp_path, 12)
    assert found.exact, found.differing
    assert (found.steps, found.cut) == (12, 6)
    assert min(found.compared[kind] for kind in ("parameter", "optimizer", "metric")) > 0
    assert list(tmp_path.iterdir()) == []  # both runs are gone


def test_state_that_no_checkpoint_holds_is_found_out(tmp_path: Path) -> None:
    hidden = ["optimization.extra=[parity_mutants.Forgetful]", "security.trusted=[parity_mutants]"]
    found = continuation(compose([*QUIET, "model.width=16", *hidden]), tmp_path, 12)
    assert not found.exact
    first = found.differing[0]
    assert first.startswith("metric train/")
    assert int(first.rpartition(" ")[2]) > found.cut  # right up to there
    assert any(name.startswith("parameter layers.0.weight") for name in found.differing)
    assert any(name.startswith("optimizer optimizer.state.0.exp_avg") for name in found.differing)
