"""A picture of how the gradient comes through the layers, and a table of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from runner.debug.gradients.layers import Layer, State, grouped, together
from runner.record import markdown
from runner.record.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    RED,
    SIDE,
    fit,
    font,
    shorten,
    width,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Dead = Mapping[str, tuple[int, int]]  # dead units and all units, by layer

ROWS = 24  # of bars; more could not be read
TOP, ROW, FOOT = 92, 36, 64
LABEL = 236  # pixels
PANELS = ((LABEL + 8, 200), (LABEL + 220, 176))  # left edge and width
COLOURS = {
    State.FINE: BLUE,
    State.NO_GRADIENT: GREY,
    State.NOT_FINITE: RED,
    State.EXPLODING: RED,
    State.VANISHING: ORANGE,
    State.NOT_OPTIMIZED: GREY,
}
WORST_FIRST = [State.NOT_FINITE, State.EXPLODING, State.VANISHING, State.NO_GRADIENT]
LEARNS = 1e-3  # an update of a thousandth of the weight is the rule of thumb of CS231n


@dataclass(frozen=True)
class Bar:
    """A module, or as many as have to share a row."""

    name: str
    label: str  # the same, and which of its layers it is that something is amiss with
    norm: float | None  # of its gradients
    update: float | None  # norm of its updates / norm of its weights
    state: State  # the worst of its layers
    dead: float  # share of its units


def bars(layers: Sequence[Layer], dead: Dead, most: int = ROWS) -> list[Bar]:
    """The layers by module, in their order."""
    found = []
    for name, members in grouped([layer.name for layer in layers], most).items():
        mine = [layers[i] for i in members]
        weight = together([layer.weight_norm for layer in mine])
        steps = [
            layer.update_ratio * layer.weight_norm
            for layer in mine
            if layer.update_ratio is not None and layer.weight_norm is not None
        ]
        update = together(steps)
        units = [pair for key, pair in dead.items() if key == name or key.startswith(f"{name}.")]
        state = _worst([layer.state for layer in mine])
        found.append(
            Bar(
                name,
                _label(name, mine, state),
                together([layer.norm for layer in mine]),
                update / weight if update is not None and weight else None,
                state,
                sum(pair[0] for pair in units) / max(1, sum(pair[1] for pair in units)),
            )
        )
    return found


def _label(name: str, layers: Sequence[Layer], state: State) -> str:
    """The module's name, or what of it is amiss: the layer, or how many of them."""
    amiss = [layer.name for layer in layers if layer.state is state]
    if state is State.FINE or len(amiss) == len(layers):
        return name
    return amiss[0] if len(amiss) == 1 else f"{name} · {len(amiss)} of {len(layers)}"


def _worst(states: Sequence[State]) -> State:
    for state in WORST_FIRST:
        if state is State.NO_GRADIENT and not all(s is state for s in states):
            continue  # as long as one of its parameters is trained, it is not what stands out
        if state in states:
            return state
    return State.FINE


def draw(layers: Sequence[Layer], dead: Dead, step: int) -> NDArray[np.uint8]:
    """Bars for the norm of the gradient and the relative update, from input to output."""
    rows = bars(layers, dead)
    height = TOP + ROW * len(rows) + FOOT
    picture = Image.new("RGB", (SIDE, height), PAPER)
    pen = ImageDraw.Draw(picture)
    pen.text((12, 12), f"gradient flow, step {step:,}", INK, font(28))
    for (left, room), title in zip(PANELS, ("gradient norm", "update / weight"), strict=True):
        pen.text((left + room / 2, 74), title, GREY, fit(title, room, 24), anchor="mm")
    columns = ([row.norm for row in rows], [row.update for row in rows])
    marks = (None, LEARNS)
    for (left, room), values, mark in zip(PANELS, columns, marks, strict=True):
        _panel(pen, left, room, values, rows, mark, height)
    for i, row in enumerate(rows):
        middle = TOP + ROW * i + ROW / 2
        colour = INK if row.state is State.FINE else COLOURS[row.state]
        label = f"{row.label} · {row.dead:.0%} dead" if row.dead >= 0.005 else row.label
        label = label if len(label) < 40 else "…" + label[-39:]
        pen.text((LABEL, middle), shorten(label, LABEL - 6, 20), colour, font(20), anchor="rm")
    _legend(pen, [row.state for row in rows], height - 18)
    return np.asarray(picture)


def _panel(
    pen: ImageDraw.ImageDraw,
    left: int,
    room: int,
    values: Sequence[float | None],
    rows: Sequence[Bar],
    mark: float | None,
    height: int,
) -> None:
    """One column of bars on a logarithmic axis, of whole decades."""
    drawn = [math.log10(v) for v in values if v is not None and 0 < v < math.inf]
    drawn += [] if mark is None or not drawn else [math.log10(mark)]
    low = math.floor(min(drawn, default=-1.0)) - 1  # so that the smallest still has a bar
    high = max(low + 1, math.ceil(max(drawn, default=0.0)))
    bottom = TOP + ROW * len(rows)

    def across(exponent: float) -> float:
        return left + room * (exponent - low) / (high - low)

    every = -(-(high - low) // 3)
    free = float(left)  # where the next label may begin
    for exponent in range(low, high + 1):
        x, label = across(exponent), f"1e{exponent}"
        pen.line((x, TOP, x, bottom), fill=(222, 226, 230))
        begins = min(max(x - width(label, 17) / 2, left), left + room - width(label, 17))
        if (exponent - low) % every == 0 and begins >= free:
            pen.text((begins, bottom + 6), label, GREY, font(17), anchor="lt")
            free = begins + width(label, 17) + 12
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = TOP + ROW * i
        colour = COLOURS[row.state]
        if value is None or value == 0:
            text = "none" if value is None else "0"
            pen.text((left + 4, y + ROW / 2), text, colour, font(18), anchor="lm")
            continue
        end = across(math.log10(value)) if math.isfinite(value) else left + room
        pen.rectangle((left, y + 7, max(end, left + 2), y + ROW - 7), fill=colour)
        if not math.isfinite(value):
            pen.text((left + 6, y + ROW / 2), "not finite", PAPER, font(18), anchor="lm")
    if mark is not None and low <= math.log10(mark) <= high:
        x = across(math.log10(mark))
        for y in range(TOP, bottom, 10):
            pen.line((x, y, x, y + 5), fill=GREEN, width=2)


def _legend(pen: ImageDraw.ImageDraw, states: Sequence[State], y: float) -> None:
    x = 12.0
    shown = [state for state in COLOURS if state in states]
    for state in shown:
        pen.rectangle((x, y - 8, x + 16, y + 8), fill=COLOURS[state])
        pen.text((x + 22, y), state.value, INK, font(18), anchor="lm")
        x += 22 + font(18).getlength(state.value) + 18
    for top in (y - 8, y - 1, y + 6):
        pen.line((x + 6, top, x + 6, top + 3), fill=GREEN, width=2)
    text = f"{LEARNS:g} of the weight: a rule of thumb"
    pen.text((x + 14, y), text, INK, fit(text, SIDE - x - 26, 18), anchor="lm")


HEADER = ("layer", "norm", "mean", "std", "largest", "zeros", "not finite", "gradient/weight",
          "update/weight", "")  # fmt: skip


def cells(layer: Layer) -> list[str]:
    """A row of the table, under `HEADER`."""
    shares = (layer.zeros, layer.non_finite)
    numbers = (layer.norm, layer.mean, layer.std, layer.largest)
    return [
        layer.name,
        *("–" if value is None else f"{value:.2e}" for value in numbers),
        *("–" if share is None else f"{share:.0%}" for share in shares),
        *("–" if r is None else f"{r:.2e}" for r in (layer.ratio, layer.update_ratio)),
        "" if layer.state is State.FINE else layer.state.value,
    ]


def table(layers: Sequence[Layer], dead: Dead) -> str:
    """Markdown for TensorBoard."""
    text = markdown.table(HEADER, [cells(layer) for layer in layers])
    if dead:
        rows = [(name, f"{gone} of {units}") for name, (gone, units) in dead.items()]
        text += "\n\n" + markdown.table(("layer", "dead units"), rows)
    return text
