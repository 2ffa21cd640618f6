"""Numbers reach the host many steps at a time, and none is lost at a checkpoint."""

from __future__ import annotations

import torch

from runner.training.hook import Step
from runner.training.metrics import Reader


def step(number: int, skipped: bool = False) -> Step:
    value = torch.tensor(float("nan") if skipped else float(number))
    return Step(number, value, torch.tensor(number / 10), torch.tensor(float(skipped)))


def test_a_report_holds_its_steps_in_order() -> None:
    reader = Reader(torch.device("cpu"))
    for number in (1, 2, 3):
        reader.add(step(number, skipped=number == 2), samples=4)
    reader.close(seconds=1.5)
    (report,) = reader.reports(wait=False)
    assert (report.first, report.last, report.samples, report.seconds) == (1, 3, 12, 1.5)
    assert report.loss[0] == 1.0
    assert report.loss[1] != report.loss[1]
    assert report.skipped == [False, True, False]
    assert reader.reports(wait=True) == []


def test_a_stretch_cut_by_a_checkpoint_reads_as_if_it_was_not() -> None:
    whole, cut = Reader(torch.device("cpu")), Reader(torch.device("cpu"))
    for number in (1, 2, 3, 4):
        whole.add(step(number), 2)
    whole.close(0.0)
    for number in (1, 2):
        cut.add(step(number), 2)
    state = cut.state()
    resumed = Reader(torch.device("cpu"))
    resumed.load(state)
    for reader in (cut, resumed):  # the one that saved goes on as well
        for number in (3, 4):
            reader.add(step(number), 2)
        reader.close(0.0)
    expected = whole.reports(wait=True)
    assert cut.reports(wait=True) == expected
    assert resumed.reports(wait=True) == expected
