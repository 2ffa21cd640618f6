"""What the gradients that a model has now say of its layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from runner.debug.config import GradientsConfig
from runner.debug.gradients import flow as gradient_flow
from runner.debug.gradients.layers import (
    STATISTICS,
    Layer,
    Named,
    State,
    described,
    judged,
    measure,
    norms,
)
from runner.record.console import plain_text
from runner.record.text import escape_control_chars

if TYPE_CHECKING:
    from rich.table import Table

CONFIRMED = 3  # looks, after which what was never trained, or vanishes, is a fault
NAMED = 5  # names in a line; more are only counted


@dataclass(frozen=True)
class GradientReport:
    """What `check_gradients` says: a row for each parameter, and what is amiss."""

    layers: list[Layer]

    @property
    def problems(self) -> list[str]:
        """Each layer with which something is amiss, in a few words; empty: all is well."""
        return [f"{row.name}: {row.state}" for row in self.layers if row.state is not State.FINE]

    def __str__(self) -> str:
        rows = [gradient_flow.HEADER, *(gradient_flow.cells(layer) for layer in self.layers)]
        rows = [[escape_control_chars(cell) for cell in row] for row in rows]
        wide = [max(len(row[i]) for row in rows) for i in range(len(gradient_flow.HEADER))]
        lines = [
            "  ".join(
                cell.rjust(room) if 0 < i < len(wide) - 1 else cell.ljust(room)
                for i, (cell, room) in enumerate(zip(row, wide, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, summed_up(states(self.layers), {})])

    def __rich__(self) -> Table:
        """The same for 80 columns, with some numbers left out."""
        from rich.table import Table

        caption = plain_text(summed_up(states(self.layers), {}))
        found = Table(box=None, padding=(0, 1), pad_edge=False, caption=caption)
        found.add_column("layer", overflow="fold")
        for heading in ("norm", "largest", "zeros", "/ weight", "update"):
            found.add_column(heading, justify="right", no_wrap=True)
        found.add_column()
        for layer in self.layers:
            row = gradient_flow.cells(layer)
            style = "" if layer.state is State.FINE else "red"
            found.add_row(*(plain_text(row[i], style) for i in (0, 1, 4, 5, 7, 8, 9)))
        return found


def check_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: GradientsConfig | None = None,
) -> GradientReport:
    """What the gradients that are in `.grad` now say of each parameter that is to be trained.

    Call it after `backward()`. With the optimizer, parameters that it does not have are named.
    The model is only looked at; on an accelerator the host waits once.
    """
    named: Named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    have = None
    if optimizer is not None:
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        have = frozenset(name for name, parameter in named if id(parameter) in theirs)
    if not named:
        return GradientReport([])
    with torch.no_grad():
        gradients = [p.grad for _, p in named if p.grad is not None]
        parts = [norms([p.detach() for _, p in named])]
        parts += [measure(gradients).flatten()] if gradients else []
        numbers = torch.cat([part.to(parts[0].device) for part in parts]).tolist()  # waits
    weights, rest = numbers[: len(named)], numbers[len(named) :]
    layers = described(named, table(rest, len(gradients)), weights)
    return GradientReport(judged(layers, config or GradientsConfig(), optimized=have))


def table(numbers: list[float], columns: int) -> list[list[float]]:
    """The rows of what `measure` gave, flattened."""
    return [numbers[i * columns : (i + 1) * columns] for i in range(STATISTICS)]


def states(layers: Sequence[Layer]) -> dict[State, list[str]]:
    """The names of the layers with which something is amiss, by what it is."""
    found: dict[State, list[str]] = {}
    for layer in layers:
        if layer.state is not State.FINE:
            found.setdefault(layer.state, []).append(layer.name)
    return found


SAYING = {
    State.NOT_FINITE: ("is not finite", "layers are not finite"),
    State.EXPLODING: ("explodes", "layers explode"),
    State.VANISHING: ("vanishes", "layers vanish"),
    State.NO_GRADIENT: ("gets no gradient", "parameters get no gradient"),
    State.NOT_OPTIMIZED: ("is in no optimizer", "parameters are in no optimizer"),
}


def summed_up(found: Mapping[State, Collection[str]], dead: Mapping[str, tuple[int, int]]) -> str:
    """What is amiss, in a few words: layers by their state, and layers with dead units."""
    parts = []
    for state, (one, many) in SAYING.items():
        layers = found.get(state, ())
        if layers:
            parts.append(
                f"{next(iter(layers))} {one}" if len(layers) == 1 else f"{len(layers)} {many}"
            )
    if dead:
        name, (gone, units) = max(dead.items(), key=lambda item: item[1][0] / item[1][1])
        more = f", and in {len(dead) - 1} layers more" if len(dead) > 1 else ""
        parts.append(f"{name}: {gone} of {units} units dead{more}")
    return "; ".join(parts) or "nothing amiss"


def some(names: list[str]) -> str:
    """Names in a line, the first few of many."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def several(number: int) -> str:
    """So many looks, in words."""
    return "1 look" if number == 1 else f"{number:,} looks"


def too_few(looks: int, remedy: str) -> str:
    """What to say instead of "nothing amiss", before there were enough looks for that."""
    return f"{several(looks)}, and {CONFIRMED} are needed for a verdict: {remedy}"
