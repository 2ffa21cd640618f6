"""Each layer's gradient, weight and update: what vanishes, explodes, is dead or never trained."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.debug.config import DebugConfig
from runner.debug.dead_units import DeadUnits
from runner.debug.gradient_layers import (
    CONFIRMED,
    FAULTS,
    Dead,
    Layer,
    Named,
    State,
    bars,
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
from runner.record.storage import read_record
from runner.training.hook import Step
from runner.training.run import Run

log = logging.getLogger("runner")

FILE, PICTURE = "debug/gradients.json", "debug/plots/gradient_flow.png"
CHARTS = 48  # of one kind in TensorBoard; beyond that, deeper modules share one
REMEMBERED = 20  # looks, whose median is what a layer's norm usually is
SHARE = 0.01  # of the run's time, that pictures and files may take
LOGGED = 5  # layers with the same fault that get a line in the log; all are in history.json
VANISHING, EXPLODING, DEAD = FAULTS[State.VANISHING], FAULTS[State.EXPLODING], "dead_units"
SLOW = 0.01  # of the largest learning rate so far; the updates of slower steps show nothing
SAMPLE = 10_000  # values of a tensor in a histogram, evenly spread
ROWS = 20_000  # of the file, about 5 MB; a row is a layer at one look
FEWEST = 8  # looks in the file, of however many layers


class GradientRecord:
    """The looks in debug/gradients.json: the first and the last ones; in between they thin out."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, list[dict[str, Any]]]] = []
        self.units: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.looks)

    def add(self, step: int, layers: Sequence[Layer], dead: Dead) -> None:
        """Add a look."""
        self.looks.append((step, [{"step": step, **layer.as_dict()} for layer in layers]))
        self.units += [
            {"step": step, "layer": name, "dead": gone, "units": units}
            for name, (gone, units) in dead.items()
        ]
        most = max(FEWEST, ROWS // max(1, len(layers)))
        if len(self.looks) > most:
            first, last = most // 4, len(self.looks) - most // 2
            self.looks[first:last] = self.looks[first:last:2]
            steps = {step for step, _ in self.looks}
            self.units = [row for row in self.units if row["step"] in steps]

    def resume(self, folder: Path | None, step: int) -> None:
        """Go on with what an earlier part of the run wrote, up to `step`."""
        if folder is None or not step:
            return
        try:
            content = json.loads(read_record(folder / FILE))
            looks: dict[int, list[dict[str, Any]]] = {}
            for row in content["layers"]:
                if row["step"] <= step:
                    looks.setdefault(row["step"], []).append(row)
            self.units = [row for row in content["units"] if row["step"] <= step]
            self.looks = list(looks.items())
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be continued: %s", FILE, error)

    def as_dict(self, finding: str) -> dict[str, Any]:
        """The content of the file."""
        rows = [row for _, layers in self.looks for row in layers]
        return {"finding": finding, "layers": rows, "units": self.units}


def sample_values(named: Named, scale: Tensor | None) -> dict[str, Tensor]:
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


def _count(looks: int) -> str:
    return "1 look" if looks == 1 else f"{looks:,} looks"


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
        self.look: _Look | None = None
        self.record = GradientRecord()
        self.layers: list[Layer] = []  # as last seen
        self.dead: Dead = {}
        self.usual: dict[str, deque[float]] = {}  # gradient norms
        self.vanishing: dict[str, int] = {}  # looks in a row
        self.never: list[str] = []  # had no gradient at any look
        self.faulty: dict[str, set[str]] = {}  # layers, by the kind of fault
        self.non_finite: set[str] = set()  # layers that were not finite at a look
        self.non_finite_looks = 0
        self.last = 0  # step
        self.peak = 0.0  # largest learning rate at a look
        self.shown: tuple[list[Layer], Dead, int] = ([], {}, 0)  # in pictures
        self.drawn = 0  # step
        self.drawing = 0.0  # seconds

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """The last picture, table and file, also of a run that was cut off."""
        self.record.resume(run.folder, run.progress.step)
        if self.knobs.dead_after:
            self.units = DeadUnits(run.model, self.knobs.dead_after)
        self.eager = self.units is not None
        self._announce_few_looks(run)
        try:
            yield
        finally:
            self.look = None
            if self.layers and self.looks < CONFIRMED:
                self._report_untrained(run)
            self._draw(run)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """See the outputs of ReLUs; judge once the update is made."""
        self.look = None
        if self.units is not None:
            self.units.begin()
        with self.units or nullcontext():
            yield
        self._finish(run, self.look)
        self.look = None

    def _finish(self, run: Run, look: _Look | None) -> None:
        if look is None:
            return
        with self.looking(), torch.no_grad():
            layers, dead = self._read(look)
            self._judge(run, look.step, layers, dead)
            self._choose_shown(run)
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
            samples = sample_values(named, scale) if wanted and self._is_cheap(run) else {}
        self.look = _Look(step.number, step.skipped, named, statistics, before, samples)
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
        first, self.last, self.dead = not self.layers, step, dead
        self.layers = judge(layers, self.knobs, usual)
        for layer in self.layers:
            self._judge_layer(run, layer)
        for name, (gone, units) in dead.items():
            if gone >= self.knobs.dead_share * units:
                text = f"{name}: {gone} of {units} units gave 0 for every sample of several looks"
                self._add_fault(run, DEAD, name, text)
        untrained = [layer.name for layer in self.layers if layer.state is State.NO_GRADIENT]
        self.never = [name for name in untrained if first or name in self.never]
        if self.never and first:
            log.info("step %d: no gradient so far: %s", step, join_names(self.never))
        self.record.add(step, self.layers, dead)
        non_finite = [layer.name for layer in self.layers if layer.state is State.NOT_FINITE]
        self.non_finite.update(non_finite)
        self.non_finite_looks += bool(non_finite)
        if self.looks + 1 == CONFIRMED:
            self._report_untrained(run)
        self.finding = self._sum_up()

    def _judge_layer(self, run: Run, layer: Layer) -> None:
        if layer.norm is not None and math.isfinite(layer.norm):
            self.usual.setdefault(layer.name, deque(maxlen=REMEMBERED)).append(layer.norm)
        again = layer.state is State.VANISHING
        in_a_row = self.vanishing.get(layer.name, 0) + 1 if again else 0
        self.vanishing[layer.name] = in_a_row
        numbers = f"gradient norm {layer.norm or 0:.3g}, of the weight {layer.weight_norm or 0:.3g}"
        if layer.state is State.EXPLODING:
            self._add_fault(run, EXPLODING, layer.name, f"{layer.name}: explodes, {numbers}")
        elif in_a_row >= CONFIRMED:
            self._add_fault(run, VANISHING, layer.name, f"{layer.name}: vanishes, {numbers}")

    def _choose_shown(self, run: Run) -> None:
        """Take the look into pictures, unless its learning rate leaves updates of next to 0."""
        rate = run.update.lr_at(self.last - 1)  # near enough where steps were skipped
        self.peak = max(self.peak, rate)
        if rate >= SLOW * self.peak or not self.shown[0]:
            self.shown = self.layers, self.dead, self.last

    def _announce_few_looks(self, run: Run) -> None:
        """Warn where the run is too short for a verdict, which takes several looks."""
        looks = run.total_steps // self.every - run.progress.step // self.every
        if looks + len(self.record) < CONFIRMED:
            self.finding = self._too_few(0)
            log.info(
                "debug.gradients: every %d steps makes %s in %d steps, and %d are needed: %s",
                *(self.every, _count(looks), run.total_steps, CONFIRMED, self._remedy()),
            )

    def _remedy(self) -> str:
        """How to have more looks."""
        if self.every == 1:
            return "train longer"
        return f"lower debug.{'gradients.' if self.knobs.every else ''}every"

    def _too_few(self, looks: int) -> str:
        needed = f"{CONFIRMED} are needed for a verdict"
        return f"{_count(looks)}, and {needed}: {self._remedy()}"

    def _report_untrained(self, run: Run) -> None:
        """Name, once, the parameters that have never had a gradient."""
        if self.never:
            text = f"no gradient at any of {len(self.record)} looks: {join_names(self.never)}"
            self._add_fault(run, "no_gradient", "", text)

    def _add_fault(self, run: Run, kind: str, name: str, message: str) -> None:
        known = self.faulty.setdefault(kind, set())
        known.add(name)
        say = len(known) <= LOGGED
        run.history.add(kind, message, step=self.last, category="numerics", say=say)

    def _sum_up(self) -> str:
        """All faults so far, and how many units are dead now."""
        names = {
            State.EXPLODING: self.faulty.get(EXPLODING, set()),
            State.VANISHING: self.faulty.get(VANISHING, set()),
            State.NO_GRADIENT: set(self.never),
        }
        share, looks = self.knobs.dead_share, len(self.record)
        dead = {n: pair for n, pair in self.dead.items() if pair[0] >= share * pair[1]}
        parts = [summarize(names, dead)] if any(names.values()) or dead else []
        if self.non_finite:
            layers = summarize({State.NOT_FINITE: self.non_finite}, {})
            parts.insert(0, f"{layers} at {self.non_finite_looks} of {_count(looks)}")
        fine = summarize({}, {}) if looks >= CONFIRMED else self._too_few(looks)
        return "; ".join(parts) or fine

    # -- pictures and files --------------------------------------------------------------------

    def _show(self, run: Run, look: _Look) -> None:
        if run.recorder.showing:
            values: dict[str, float] = {}
            for bar in bars(self.layers, self.dead, CHARTS):
                for chart, value in (("norm", bar.norm), ("update_ratio", bar.update)):
                    if value is not None:
                        values[f"{chart}/{bar.name}"] = value
            for name, (gone, units) in self.dead.items():
                values[f"dead_units/{name}"] = gone / units
            run.recorder.show(look.step, "gradients", values)
        start = time.perf_counter()
        for tag, sample in look.samples.items():
            run.recorder.histogram(tag, sample.float().cpu().numpy(), look.step)  # waits
        self.drawing += time.perf_counter() - start
        every = self.knobs.histograms_every
        if every and (self.looks + 1) % every == 0 and self._is_cheap(run):
            self._draw(run)

    def _is_cheap(self, run: Run) -> bool:
        return self.drawing <= SHARE * run.watch.elapsed()

    def _draw(self, run: Run) -> None:
        """Picture, table and file."""
        if run.folder is None:
            return
        start = time.perf_counter()
        layers, dead, step = self.shown
        if layers and self.drawn != step:
            picture = draw_flow(layers, dead, step)
            run.recorder.image("gradients/flow", picture, step)
            run.recorder.save_image(PICTURE, picture)
            run.recorder.text("gradients/layers", layer_table(layers, dead), step)
            self.drawn = step
        self.write_json(run.folder, FILE, self.record.as_dict(self.finding))
        self.drawing += time.perf_counter() - start
