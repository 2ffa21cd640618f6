"""Each layer's gradient, weight and update: what vanishes, explodes, is dead or never trained."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.debug.config import DebugConfig
from runner.debug.dead_units import DeadUnits
from runner.debug.gradient_layers import (
    FAULTS,
    Dead,
    Layer,
    LayerState,
    Named,
    by_module,
    describe,
    draw_flow,
    join_names,
    judge,
    layer_table,
    measure,
    norms,
    summarize,
)
from runner.debug.tool import Tool
from runner.training.hook import Step
from runner.training.run import Run

log = logging.getLogger("runner")

FILE, PICTURE = "debug/gradients.json", "debug/plots/gradient_flow.png"
CHARTS = 48  # of one kind in TensorBoard; beyond that, deeper modules share one
CONFIRMED = 3  # looks, after which what was never trained, or vanishes, is a fault
REMEMBERED = 20  # looks, whose median is what a layer's norm usually is
LOGGED = 5  # layers with the same fault that get a line in the log; all are in history.json
SLOW = 0.01  # of the largest learning rate so far; the updates of slower steps show nothing
SAMPLE = 10_000  # values of a tensor in a histogram, evenly spread
ROWS = 20_000  # of the file, about 5 MB; a row is a layer at one look


@dataclass
class _Look:
    """The numbers of a step once its backward is through, on the device."""

    step: int
    skipped: Tensor
    named: Named
    statistics: Tensor | None
    before: list[Tensor]  # weights
    samples: dict[str, Tensor]  # for histograms


class Gradients(Tool):
    """Looks at all layers every `debug.gradients.every` steps.

    Those steps leave a compiled whole-step graph, and where the model has ReLUs they run
    uncompiled, so that their outputs can be seen. A look holds a second copy of the weights until
    the update is made, reads all its numbers in one transfer, and leaves the computation alone.
    """

    name = "gradients"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.gradients.every)
        self.knobs = config.gradients
        self.units: DeadUnits | None = None
        self.pending: list[_Look] = []  # the step's, until its update is made
        self.rows: list[dict[str, Any]] = []  # of the file: layers …
        self.unit_rows: list[dict[str, Any]] = []  # … and dead units
        self.seen = 0  # looks that were judged
        self.layers: list[Layer] = []  # as last seen
        self.dead: Dead = {}
        self.usual: dict[str, deque[float]] = {}  # gradient norms
        self.vanishing: dict[str, int] = {}  # looks in a row
        self.never: list[str] = []  # had no gradient at any look
        self.faulty: dict[LayerState, dict[str, None]] = {}  # layers, by their fault
        self.peak = 0.0  # largest learning rate at a look
        self.shown: tuple[list[Layer], Dead, int] = ([], {}, 0)  # in pictures

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """The last picture, table and file, also of a run that was cut off."""
        if self.knobs.dead_after:
            self.units = DeadUnits(run.model, self.knobs.dead_after)
        self.eager = self.units is not None
        self.finding = self._sum_up()
        try:
            yield
        finally:
            if self.layers and self.looks < CONFIRMED:
                self._report_untrained(run)
            self._draw(run)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """See the outputs of ReLUs; judge once the update is made."""
        self.pending.clear()
        if self.units is not None:
            self.units.begin()
        with self.units or nullcontext():
            yield
        for look in self.pending:
            self._finish(run, look)
        self.pending.clear()

    def _finish(self, run: Run, look: _Look) -> None:
        with self.timed(), torch.no_grad():
            layers, dead = self._read(look)
            self._judge(run, look.step, layers, dead)
            self._show(run, look)
            if self.units is not None and not self.units.layers:
                self.units, self.eager = None, False  # there are no ReLUs

    def on_gradients(self, run: Run, step: Step) -> None:
        """Measure the gradients, on the device; the update may write over them."""
        start = time.perf_counter()
        named: Named = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        gradients = [p.grad for _, p in named if p.grad is not None]
        scale = run.update.scale.value if run.update.scale else None
        with torch.no_grad():
            statistics = measure(gradients, scale) if gradients else None
            before = [p.detach().clone() for _, p in named]
            every = self.knobs.histograms_every
            wanted = every and self.looks % every == 0 and run.recorder.showing
            samples = _sample_values(named, scale) if wanted else {}
        self.pending = [_Look(step.number, step.skipped, named, statistics, before, samples)]
        self.seconds += time.perf_counter() - start

    def _read(self, look: _Look) -> tuple[list[Layer], Dead]:
        """The look's numbers, on the host: weights, updates, flag, dead units, statistics."""
        weights = norms(look.before)
        torch._foreach_sub_(look.before, [p.detach() for _, p in look.named])
        parts = [weights, norms(look.before), look.skipped.reshape(1).float()]
        units = self.units if self.units is not None and self.units.layers else None
        if units is not None:
            parts.append(units.count(look.skipped))
        if look.statistics is not None:
            parts.append(look.statistics.flatten())
        numbers = iter(torch.cat([part.to(weights.device) for part in parts]).tolist())  # waits
        sizes = [next(numbers) for _ in look.named]
        updates = [next(numbers) for _ in look.named]
        skipped = next(numbers) > 0
        dead = {} if units is None else units.describe([next(numbers) for _ in units.layers])
        layers = describe(look.named, list(numbers), sizes)
        if not skipped:
            layers = [
                replace(layer, update_ratio=update / layer.weight_norm)
                if layer.weight_norm and layer.norm is not None
                else layer
                for layer, update in zip(layers, updates, strict=True)
            ]
        return layers, dead

    # -- verdicts ------------------------------------------------------------------------------

    def _judge(self, run: Run, step: int, layers: list[Layer], dead: Dead) -> None:
        usual = {name: median(seen) for name, seen in self.usual.items() if len(seen) >= CONFIRMED}
        first = not self.layers
        self.layers, self.dead = judge(layers, self.knobs, usual), dead
        for layer in self.layers:
            self._judge_layer(run, step, layer)
        for name, (gone, units) in self._dead_layers().items():
            text = f"{name}: {gone} of {units} units gave 0 for every sample of several looks"
            run.history.add("dead_units", text, step=step, category="numerics")
        untrained = [layer.name for layer in self.layers if layer.state is LayerState.NO_GRADIENT]
        self.never = [name for name in untrained if first or name in self.never]
        self._record(step)
        rate = run.update.lr_at(step - 1)  # near enough where steps were skipped
        self.peak = max(self.peak, rate)
        if rate >= SLOW * self.peak or not self.shown[0]:
            self.shown = self.layers, dead, step
        if self.looks + 1 == CONFIRMED:
            self._report_untrained(run)
        self.finding = self._sum_up()

    def _judge_layer(self, run: Run, step: int, layer: Layer) -> None:
        """Count the layer's fault; vanishing is one after some looks in a row."""
        if layer.norm is not None and math.isfinite(layer.norm):
            self.usual.setdefault(layer.name, deque(maxlen=REMEMBERED)).append(layer.norm)
        state, verb = (
            layer.state,
            {LayerState.EXPLODING: "explodes", LayerState.VANISHING: "vanishes"},
        )
        in_a_row = self.vanishing.get(layer.name, 0) + 1 if state is LayerState.VANISHING else 0
        self.vanishing[layer.name] = in_a_row
        if state not in (LayerState.NOT_FINITE, *verb) or 0 < in_a_row < CONFIRMED:
            return
        known = self.faulty.setdefault(state, {})
        known[layer.name] = None
        if state in verb:  # the guard says what is not finite
            numbers = f"gradient norm {layer.norm:.3g}, of the weight {layer.weight_norm or 0:.3g}"
            text = f"{layer.name}: {verb[state]}, {numbers}"
            say = len(known) <= LOGGED
            run.history.add(FAULTS[state], text, step=step, category="numerics", say=say)

    def _dead_layers(self) -> Dead:
        """The layers with so many dead units that it is a fault."""
        share = self.knobs.dead_share
        return {n: (gone, units) for n, (gone, units) in self.dead.items() if gone >= share * units}

    def _report_untrained(self, run: Run) -> None:
        """Name, once, the parameters that have never had a gradient."""
        if self.never:
            text = f"no gradient at any of {self.seen} looks: {join_names(self.never)}"
            run.history.add("no_gradient", text, step=run.progress.step, category="numerics")

    def _sum_up(self) -> str:
        """All faults so far, how many units are dead now, and whether there were enough looks."""
        names = {**self.faulty, LayerState.NO_GRADIENT: dict.fromkeys(self.never)}
        summary = summarize(names, self._dead_layers())
        if self.seen >= CONFIRMED or self.faulty or self.never:
            return summary
        remedy = f"lower debug.{'gradients.' if self.knobs.every else ''}every"
        remedy = "train longer" if self.every == 1 else remedy
        looks = "1 look" if self.seen == 1 else f"{self.seen} looks"
        return f"{looks}, and {CONFIRMED} are needed for a verdict: {remedy}"

    # -- pictures and files --------------------------------------------------------------------

    def _record(self, step: int) -> None:
        """Add the look to the file's rows; of too many every second one before the last stays."""
        self.seen += 1
        self.rows += [{"step": step, **layer.as_dict()} for layer in self.layers]
        self.unit_rows += [
            {"step": step, "layer": name, "dead": gone, "units": units}
            for name, (gone, units) in self.dead.items()
        ]
        steps = list(dict.fromkeys(row["step"] for row in self.rows))
        if len(self.rows) > ROWS and len(steps) > 8:
            kept = {*steps[:-1:2], steps[-1]}
            self.rows = [row for row in self.rows if row["step"] in kept]
            self.unit_rows = [row for row in self.unit_rows if row["step"] in kept]

    def _show(self, run: Run, look: _Look) -> None:
        if run.recorder.showing:
            values: dict[str, float] = {}
            for bar in by_module(self.layers, CHARTS):
                for chart, value in (("norm", bar.norm), ("update_ratio", bar.update_ratio)):
                    if value is not None:
                        values[f"{chart}/{bar.name}"] = value
            for name, (gone, units) in self.dead.items():
                values[f"dead_units/{name}"] = gone / units
            run.recorder.show(look.step, "gradients", values)
        for tag, sample in look.samples.items():
            run.recorder.histogram(tag, sample.float().cpu().numpy(), look.step)  # waits

    def _draw(self, run: Run) -> None:
        """Picture, table and file."""
        if run.folder is None:
            return
        layers, dead, step = self.shown
        if layers:
            picture = draw_flow(layers, step)
            run.recorder.image("gradients/flow", picture, step)
            run.recorder.save_image(PICTURE, picture)
            run.recorder.text("gradients/layers", layer_table(layers, dead), step)
        record = {"finding": self.finding, "layers": self.rows, "units": self.unit_rows}
        self.write_json(run.folder, FILE, record)


def _sample_values(named: Named, scale: Tensor | None) -> dict[str, Tensor]:
    """At most `SAMPLE` values of each gradient and weight, by tag; still on the device."""

    def spread(tensor: Tensor) -> Tensor:
        values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
        return values[:: -(-max(1, values.numel()) // SAMPLE)].clone()

    samples = {}
    for name, parameter in named:
        samples[f"weights/{name}"] = spread(parameter.detach())
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            gradient = spread(parameter.grad)
            samples[f"gradients/{name}"] = gradient if scale is None else gradient / scale
    return samples
