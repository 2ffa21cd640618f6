"""Learning-rate schedules as a function of the number of updates."""

from __future__ import annotations

import math

from runner.core.schemas.optimizer import ScheduleConfig, ScheduleKind


def lr_factors(config: ScheduleConfig, updates: int) -> list[float]:
    """Return the factor on the peak learning rate for each of `updates` updates.

    Warm-up rises linearly and ends at 1. `onecycle` is the curve of torch's OneCycleLR with its
    defaults: a cosine from 1/25 up over 30 % of the run, then one down to 1/250,000. Momentum stays
    constant.
    """
    if config.kind is ScheduleKind.onecycle:
        warmup = config.warmup or 0.3
        rise = (warmup if warmup >= 1 else warmup * updates) - 1  # as torch counts: to update 0
        return [_one_cycle(u, rise, updates) for u in range(updates)]
    warmup = _to_updates(config.warmup, updates)
    every = max(1, _to_updates(config.every, updates))
    span = max(1, updates - warmup)

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        elapsed = update - warmup
        if config.kind is ScheduleKind.cosine:
            return config.floor + (1 - config.floor) * _cosine(elapsed / span)
        if config.kind is ScheduleKind.linear:
            return config.floor + (1 - config.floor) * (1 - elapsed / span)
        if config.kind is ScheduleKind.step:
            return config.gamma ** (elapsed // every)
        return 1.0

    return [factor(u) for u in range(updates)]


def _to_updates(value: float, updates: int) -> int:
    """Return a number of updates: `value` itself if it is 1 or more, else that share of the run."""
    return round(value if value >= 1 else value * updates)


def _cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def _one_cycle(update: int, rise: float, updates: int) -> float:
    low, last = 1 / 25, 1 / 250_000
    if update <= rise:
        return 1 + (low - 1) * _cosine(update / rise) if rise > 0 else 1.0
    return last + (1 - last) * _cosine((update - rise) / (updates - 1 - rise))
