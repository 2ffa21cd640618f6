"""A picture of how the gradient comes through the layers, and a table of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.debug.gradients.layers import Layer, State, grouped, together
from runner.record import markdown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Dead = Mapping[str, tuple[int, int]]  # dead units and all units, by layer

ROWS = 24  # of bars; more could not be read
WORST_FIRST = [State.NOT_FINITE, State.EXPLODING, State.VANISHING, State.NO_GRADIENT]


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
    from runner.record import plots

    colours = {
        State.FINE: plots.BLUE,
        State.NO_GRADIENT: plots.GREY,
        State.NOT_FINITE: plots.RED,
        State.EXPLODING: plots.RED,
        State.VANISHING: plots.ORANGE,
        State.NOT_OPTIMIZED: plots.GREY,
    }
    rows = bars(layers, dead)
    names = [f"{r.label} · {r.dead:.0%} dead" if r.dead >= 0.005 else r.label for r in rows]
    return plots.gradient_flow(
        names,
        [row.norm for row in rows],
        [row.update for row in rows],
        [colours[row.state] for row in rows],
        {state.value: colours[state] for state in colours if state in {r.state for r in rows}},
        step,
    )


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
