"""The learning rate's shape, against torch.optim where torch has the same one."""

from __future__ import annotations

import pytest
import torch

from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import ScheduleConfig, ScheduleKind


def torch_rates(make: object, updates: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)  # type: ignore[operator]
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(updates - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_cosine_equals_torchs_annealing() -> None:
    ours = lr_factors(ScheduleConfig(ScheduleKind.cosine, floor=0.1), 40)
    theirs = torch_rates(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40, eta_min=0.1), 40
    )
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("updates", "warmup"), [(100, 0.0), (77, 0.0), (40, 0.5), (40, 13), (4, 0.0), (100, 0.005)]
)
def test_onecycle_equals_torchs(updates: int, warmup: float) -> None:
    share = (warmup / updates if warmup >= 1 else warmup) or 0.3
    ours = lr_factors(ScheduleConfig(ScheduleKind.onecycle, warmup=warmup), updates)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    theirs = torch_rates(lambda o: one_cycle(o, 1.0, updates, pct_start=share), updates)
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_onecycle_of_one_update_is_finite() -> None:
    assert 0 < lr_factors(ScheduleConfig(ScheduleKind.onecycle), 1)[0] <= 1
    assert lr_factors(ScheduleConfig(ScheduleKind.onecycle, warmup=1), 1) == [1.0]


def test_step_drops_by_gamma_every_so_many_updates() -> None:
    config = ScheduleConfig(ScheduleKind.step, every=3, gamma=0.5)
    assert lr_factors(config, 8) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_warmup_rises_linearly_and_ends_at_the_peak() -> None:
    config = ScheduleConfig(ScheduleKind.linear, warmup=4)
    rates = lr_factors(config, 14)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == pytest.approx([1 - i / 10 for i in range(1, 10)])


def test_a_warmup_below_one_is_a_share_of_the_run() -> None:
    assert lr_factors(ScheduleConfig(warmup=0.25), 8) == lr_factors(ScheduleConfig(warmup=2), 8)
