"""Each layer's gradient, weight and update: what vanishes, explodes, is dead or never trained."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from runner.debug.config import DebugConfig
from runner.debug.gradients import flow as gradient_flow
from runner.debug.gradients.layers import (
    FAULTS,
    Layer,
    Named,
    State,
    described,
    judged,
    measure,
    norms,
)
from runner.debug.gradients.record import GradientRecord
from runner.debug.gradients.report import CONFIRMED, several, some, summed_up, table, too_few
from runner.debug.gradients.report import GradientReport as GradientReport
from runner.debug.gradients.report import check_gradients as check_gradients
from runner.debug.gradients.samples import sampled
from runner.debug.gradients.units import Units
from runner.debug.tool import Tool
from runner.hook import Step
from runner.run import Run

log = logging.getLogger("runner")

PICTURE = "debug/plots/gradient_flow.png"
CHARTS = 48  # of one kind in TensorBoard; beyond that, deeper modules share one
REMEMBERED = 20  # looks, whose median is what a layer's norm usually is
SHARE = 0.01  # of the run's time, that pictures and files may take
SAID = 5  # layers with the same fault that get a line in the log; all are in history.json
VANISHING, EXPLODING, DEAD = FAULTS[State.VANISHING], FAULTS[State.EXPLODING], "dead_units"
SLOW = 0.01  # of the largest learning rate so far; the updates of slower steps show nothing


@dataclass
class _Look:
    """What is known of a step once its backward is through, on the device."""

    step: int
    skipped: Tensor
    named: Named
    trained: int  # how many of them have a gradient
    table: Tensor | None
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
        self.units: Units | None = None
        self.look: _Look | None = None
        self.record = GradientRecord()
        self.layers: list[Layer] = []  # as last seen
        self.dead: dict[str, tuple[int, int]] = {}  # units of a layer, and all there are
        self.usual: dict[str, deque[float]] = {}  # gradient norms
        self.vanishing: dict[str, int] = {}  # looks in a row
        self.never: list[str] = []  # had no gradient at any look
        self.faulty: dict[str, set[str]] = {}  # layers, by the kind of fault
        self.odd: set[str] = set()  # layers that were not finite at a look
        self.odd_looks = 0
        self.last = 0  # step
        self.peak = 0.0  # largest learning rate at a look
        self.shown: tuple[list[Layer], dict[str, tuple[int, int]], int] = ([], {}, 0)  # in pictures
        self.drawn = 0  # step
        self.drawing = 0.0  # seconds

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """The last picture, table and file, also of a run that was cut off."""
        self.record.resume(run.folder, run.progress.step)
        if self.knobs.dead_after:
            self.units = Units(run.model, self.knobs.dead_after)
        self.eager = self.units is not None
        self._expect(run)
        try:
            yield
        finally:
            self.look = None
            if self.layers and self.looks < CONFIRMED:
                self._confirm(run)
            self._draw(run)

    def around(self, run: Run) -> AbstractContextManager[None]:
        """Sees the outputs of ReLUs; once the update is made, says what there is to say."""
        return self._around(run)

    @contextmanager
    def _around(self, run: Run) -> Iterator[None]:
        self.look = None
        if self.units is not None:
            self.units.begin()
        with self.units or nullcontext():
            yield
        look = self._taken()
        if look is not None:
            with self.looking(), torch.no_grad():
                layers, dead = self._read(look)
                self._judge(run, look.step, layers, dead)
                self._choose(run)
                self._show(run, look)
                if self.units is not None and not self.units.layers:
                    self.units, self.eager = None, False  # there are no ReLUs

    def _taken(self) -> _Look | None:
        look, self.look = self.look, None
        return look

    def on_gradients(self, run: Run, step: Step) -> None:
        """Measure the gradients, on the device; the update may write over them."""
        start = time.perf_counter()
        named: Named = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        gradients = [p.grad for _, p in named if p.grad is not None]
        scale = run.update.scale.value if run.update.scale else None
        with torch.no_grad():
            measured = measure(gradients, scale) if gradients else None
            before = [p.detach().clone() for _, p in named]
            every = self.knobs.histograms_every
            wanted = every and self.looks % every == 0 and run.recorder.showing
            samples = sampled(named, scale) if wanted and self._worth_it(run) else {}
        self.look = _Look(
            step.number, step.skipped, named, len(gradients), measured, before, samples
        )
        self.seconds += time.perf_counter() - start

    def _read(self, look: _Look) -> tuple[list[Layer], dict[str, tuple[int, int]]]:
        """The look's numbers, on the host: weights, updates, flag, dead units, statistics."""
        weights = norms(look.before)
        torch._foreach_sub_(look.before, [p.detach() for _, p in look.named])
        parts = [weights, norms(look.before), look.skipped.reshape(1).float()]
        units = self.units if self.units is not None and self.units.layers else None
        if units is not None:
            parts.append(units.count(look.skipped))
        if look.table is not None:
            parts.append(look.table.flatten())
        numbers = torch.cat([part.to(weights.device) for part in parts]).tolist()  # waits
        at = iter(numbers)
        sizes = [next(at) for _ in look.named]
        updates = [next(at) for _ in look.named]
        skipped = next(at) > 0
        dead = {} if units is None else units.described([next(at) for _ in units.layers])
        layers = described(look.named, table(list(at), look.trained), sizes)
        if not skipped:
            layers = [
                replace(layer, update_ratio=update / layer.weight_norm)
                if layer.weight_norm and layer.norm is not None
                else layer
                for layer, update in zip(layers, updates, strict=True)
            ]
        return layers, dead

    # -- verdicts ------------------------------------------------------------------------------

    def _judge(
        self, run: Run, step: int, layers: list[Layer], dead: dict[str, tuple[int, int]]
    ) -> None:
        usual = {name: median(seen) for name, seen in self.usual.items() if len(seen) >= CONFIRMED}
        first, self.last, self.dead = not self.layers, step, dead
        self.layers = judged(layers, self.knobs, usual)
        for layer in self.layers:
            if layer.norm is not None and math.isfinite(layer.norm):
                self.usual.setdefault(layer.name, deque(maxlen=REMEMBERED)).append(layer.norm)
            again = layer.state is State.VANISHING
            self.vanishing[layer.name] = self.vanishing.get(layer.name, 0) + 1 if again else 0
            what = (
                f"gradient norm {layer.norm or 0:.3g}, of the weight {layer.weight_norm or 0:.3g}"
            )
            if layer.state is State.EXPLODING:
                self._note(run, EXPLODING, layer.name, f"{layer.name}: explodes, {what}")
            elif self.vanishing[layer.name] >= CONFIRMED:
                self._note(run, VANISHING, layer.name, f"{layer.name}: vanishes, {what}")
        for name, (gone, units) in dead.items():
            if gone >= self.knobs.dead_share * units:
                text = f"{name}: {gone} of {units} units gave 0 for every sample of several looks"
                self._note(run, DEAD, name, text)
        untrained = [layer.name for layer in self.layers if layer.state is State.NO_GRADIENT]
        self.never = [n for n in untrained if first or n in self.never]
        if self.never and first:
            log.info("step %d: no gradient so far: %s", step, some(self.never))
        self.record.add(step, self.layers, dead)
        odd = [layer.name for layer in self.layers if layer.state is State.NOT_FINITE]
        self.odd.update(odd)
        self.odd_looks += bool(odd)
        if self.looks + 1 == CONFIRMED:
            self._confirm(run)
        self.finding = self._sum_up()

    def _choose(self, run: Run) -> None:
        """Take the look into pictures, unless its learning rate leaves updates of next to 0."""
        rate = run.update.lr_at(self.last - 1)  # near enough where steps were skipped
        self.peak = max(self.peak, rate)
        if rate >= SLOW * self.peak or not self.shown[0]:
            self.shown = self.layers, self.dead, self.last

    def _expect(self, run: Run) -> None:
        """Say so where the run is too short for what takes several looks."""
        looks = run.total_steps // self.every - run.progress.step // self.every
        if looks + len(self.record) < CONFIRMED:
            self.finding = too_few(0, self._remedy())
            log.info(
                "debug.gradients: every %d steps makes %s in %d steps, and %d are needed: %s",
                self.every, several(looks), run.total_steps, CONFIRMED, self._remedy(),
            )  # fmt: skip

    def _remedy(self) -> str:
        """What makes more looks."""
        if self.every == 1:
            return "train longer"
        return f"lower debug.{'gradients.' if self.knobs.every else ''}every"

    def _confirm(self, run: Run) -> None:
        """Name, once, what has never had a gradient."""
        if self.never:
            text = f"no gradient at any of {len(self.record)} looks: {some(self.never)}"
            self._note(run, "no_gradient", "", text)

    def _note(self, run: Run, kind: str, name: str, message: str) -> None:
        known = self.faulty.setdefault(kind, set())
        known.add(name)
        say = len(known) <= SAID
        run.history.add(kind, message, step=self.last, category="numerics", say=say)

    def _sum_up(self) -> str:
        """What was ever found, and how many units are dead now."""
        found = {
            State.EXPLODING: self.faulty.get(EXPLODING, set()),
            State.VANISHING: self.faulty.get(VANISHING, set()),
            State.NO_GRADIENT: set(self.never),
        }
        share, looks = self.knobs.dead_share, len(self.record)
        dead = {n: pair for n, pair in self.dead.items() if pair[0] >= share * pair[1]}
        parts = [summed_up(found, dead)] if any(found.values()) or dead else []
        if self.odd:
            odd = summed_up({State.NOT_FINITE: self.odd}, {})
            parts.insert(0, f"{odd} at {self.odd_looks} of {several(looks)}")
        fine = summed_up({}, {}) if looks >= CONFIRMED else too_few(looks, self._remedy())
        return "; ".join(parts) or fine

    # -- what is shown -------------------------------------------------------------------------

    def _show(self, run: Run, look: _Look) -> None:
        if run.recorder.showing:
            values: dict[str, float] = {}
            for bar in gradient_flow.bars(self.layers, self.dead, CHARTS):
                for chart, value in (("norm", bar.norm), ("update_ratio", bar.update)):
                    if value is not None:
                        values[f"{chart}/{bar.name}"] = value
            for name, (gone, units) in self.dead.items():
                values[f"dead_units/{name}"] = gone / units
            run.recorder.show(look.step, "gradients", values)
        if look.samples:
            start = time.perf_counter()
            for tag, sample in look.samples.items():
                run.recorder.histogram(tag, sample.float().cpu().numpy(), look.step)  # waits
            self.drawing += time.perf_counter() - start
        every = self.knobs.histograms_every
        if every and (self.looks + 1) % every == 0 and self._worth_it(run):
            self._draw(run)

    def _worth_it(self, run: Run) -> bool:
        return self.drawing <= SHARE * run.watch.elapsed()

    def _draw(self, run: Run) -> None:
        """Picture, table and file; 20 to 50 ms."""
        if run.folder is None:
            return
        start = time.perf_counter()
        layers, dead, step = self.shown
        if layers and self.drawn != step:
            picture = gradient_flow.draw(layers, dead, step)
            run.recorder.image("gradients/flow", picture, step)
            run.recorder.save_image(PICTURE, picture)
            run.recorder.text("gradients/layers", gradient_flow.table(layers, dead), step)
            self.drawn = step
        self.record.write(run.folder, self.finding)
        self.drawing += time.perf_counter() - start
