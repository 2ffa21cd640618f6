"""Track each layer's gradient, weight and update: vanishing, exploding, dead, untrained."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.debug.config import DebugConfig
from runner.debug.gradient_layers import (
    FAULTS,
    Dead,
    Layer,
    LayerState,
    Named,
    describe,
    draw_flow,
    judge,
    measure,
    norms,
    select_weights,
    summarize,
)
from runner.debug.tool import Tool
from runner.format import listed
from runner.training.hook import Step
from runner.training.run import Run

FILE, PICTURE = "debug/gradients.json", "debug/plots/gradient_flow.png"
CHARTS = 48  # per chart kind, in TensorBoard
CONFIRMED = 3  # looks until an untrained or vanishing layer is a fault
REMEMBERED = 20  # looks whose median is a layer's usual norm
LOGGED = 5  # layers per fault that are logged; all are in history.json
ROWS = 20_000  # in the file, newest: about 5 MB; one per layer and look
NAMED_FAULTS = (LayerState.EXPLODING, LayerState.VANISHING)  # the guard reports non-finite ones
# activations with zero gradient where the output is 0, unlike leaky ReLU or GELU
RELUS = {"relu", "relu_", "relu6", "_threshold", "threshold_"}
CHANNELS = ("conv", "batch_norm", "instance_norm", "group_norm")  # their units are in dimension 1
SAMPLES = 128  # minimum per verdict, since some units are rarely active


@dataclass
class _Look:
    """The tensors of a step after its backward, on the device."""

    step: int
    skipped: Tensor
    named: Named
    statistics: Tensor | None
    before: list[Tensor]  # weights


class Gradients(Tool):
    """Inspects all layers every `debug.gradients.every` steps.

    These steps leave a compiled whole-step graph, and run uncompiled if the model has ReLUs, to see
    their outputs. A look keeps a copy of the weights until the update, reads all numbers in one
    transfer, and does not change the computation.
    """

    name = "gradients"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.gradients.every)
        self.knobs = config.gradients
        self.units: DeadUnits | None = None
        self.pending: _Look | None = None  # waiting for the step's update
        self.rows: deque[dict[str, Any]] = deque(maxlen=ROWS)  # of layers, for the file
        self.unit_rows: deque[dict[str, Any]] = deque(maxlen=ROWS)  # of dead units, for the file
        self.layers: list[Layer] = []  # at the last look
        self.dead: Dead = {}
        self.usual: dict[str, deque[float]] = {}  # gradient norms
        self.vanishing: Counter[str] = Counter()  # consecutive looks
        self.never: list[str] = []  # layers without a gradient at any look
        self.faulty: dict[LayerState, dict[str, None]] = {}  # faulty layers by state

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Write plot and file at the end, even after an error."""
        if self.knobs.dead_after:
            self.units = DeadUnits(run.model, self.knobs.dead_after)
        self.eager = self.units is not None
        self.finding = self._sum_up()
        try:
            yield
        finally:
            if self.layers and self.looks < CONFIRMED:
                self._report_untrained(run, self.looks)
            self._write(run)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Observe ReLU outputs; judge the layers after the update."""
        self.pending = None
        if self.units is not None:
            self.units.begin()
        with self.units or nullcontext():
            yield
        self._finish(run)

    def on_gradients(self, run: Run, step: Step) -> None:
        """Measure gradients on the device, before the update overwrites them."""
        start = time.perf_counter()
        named: Named = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        gradients = [p.grad for _, p in named if p.grad is not None]
        scale = run.update.scale.value if run.update.scale else None
        with torch.no_grad():
            statistics = measure(gradients, scale) if gradients else None
            before = [p.detach().clone() for _, p in named]
        self.pending = _Look(step.number, step.skipped, named, statistics, before)
        self.seconds += time.perf_counter() - start

    def _finish(self, run: Run) -> None:
        look = self.pending
        if look is None:
            return
        with self.timed(), torch.no_grad():
            layers = self._read(look)
            self._judge(run, look.step, layers)
            self._show(run, look.step)
            if self.units is not None and not self.units.layers:
                self.units, self.eager = None, False  # no ReLUs

    def _read(self, look: _Look) -> list[Layer]:
        """Read weights, updates, skip flag, dead units and statistics in one transfer."""
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
        self.dead = {} if units is None else units.describe([next(numbers) for _ in units.layers])
        layers = describe(look.named, list(numbers), sizes)
        return layers if skipped else list(map(_with_update, layers, updates))

    # -- verdicts ------------------------------------------------------------------------------

    def _judge(self, run: Run, step: int, layers: list[Layer]) -> None:
        usual = {name: median(past) for name, past in self.usual.items() if len(past) >= CONFIRMED}
        first = not self.layers
        self.layers = judge(layers, self.knobs, usual)
        for layer in self.layers:
            self._judge_layer(run, step, layer)
            self.rows.append({"step": step, **layer.as_dict()})
        for name, (gone, units) in self.dead.items():
            self.unit_rows.append({"step": step, "layer": name, "dead": gone, "units": units})
        for name, (gone, units) in self._dead_layers().items():
            text = f"{name}: {gone} of {units} units gave 0 for every sample in several checks"
            run.history.add("dead_units", text, step=step, category="numerics")
        untrained = [layer.name for layer in self.layers if layer.state is LayerState.NO_GRADIENT]
        self.never = [name for name in untrained if first or name in self.never]
        if self.looks + 1 == CONFIRMED:
            self._report_untrained(run, CONFIRMED)
        self.finding = self._sum_up(looks=self.looks + 1)

    def _judge_layer(self, run: Run, step: int, layer: Layer) -> None:
        """Record the layer's fault; vanishing counts after CONFIRMED consecutive looks."""
        if layer.norm is not None and math.isfinite(layer.norm):
            self.usual.setdefault(layer.name, deque(maxlen=REMEMBERED)).append(layer.norm)
        state = layer.state
        in_a_row = self.vanishing[layer.name] + 1 if state is LayerState.VANISHING else 0
        self.vanishing[layer.name] = in_a_row
        if state not in (LayerState.NOT_FINITE, *NAMED_FAULTS) or 0 < in_a_row < CONFIRMED:
            return
        known = self.faulty.setdefault(state, {})
        known[layer.name] = None
        if state in NAMED_FAULTS:
            numbers = f"gradient norm {layer.norm:.3g}, of the weight {layer.weight_norm or 0:.3g}"
            text = f"{layer.name}: {state}, {numbers}"
            say = len(known) <= LOGGED
            run.history.add(FAULTS[state], text, step=step, category="numerics", say=say)

    def _dead_layers(self) -> Dead:
        """Return the layers in which the share of dead units is a fault."""
        share = self.knobs.dead_share
        return {n: (gone, units) for n, (gone, units) in self.dead.items() if gone >= share * units}

    def _report_untrained(self, run: Run, looks: int) -> None:
        """Report once the parameters that never had a gradient."""
        if self.never:
            text = f"no gradient in any of {looks} checks: {listed(self.never)}"
            run.history.add("no_gradient", text, step=run.progress.step, category="numerics")

    def _sum_up(self, looks: int = 0) -> str:
        """Summarise all faults, the dead units, and whether there were enough looks."""
        names = {**self.faulty, LayerState.NO_GRADIENT: dict.fromkeys(self.never)}
        if looks >= CONFIRMED or self.faulty or self.never:
            return summarize(names, self._dead_layers())
        remedy = f"lower debug.{'gradients.' if self.knobs.every else ''}every"
        remedy = "train longer" if self.every == 1 else remedy
        count = "1 check" if looks == 1 else f"{looks} checks"
        return f"{count}, but a verdict needs {CONFIRMED}: {remedy}"

    # -- pictures and files --------------------------------------------------------------------

    def _show(self, run: Run, step: int) -> None:
        """Write scalars to TensorBoard."""
        values = {f"dead_units/{name}": gone / units for name, (gone, units) in self.dead.items()}
        for layer in select_weights(self.layers, CHARTS):
            for chart, value in (("norm", layer.norm), ("update_ratio", layer.update_ratio)):
                if value is not None:
                    values[f"{chart}/{layer.name}"] = value
        run.recorder.show(step, "gradients", values)

    def _write(self, run: Run) -> None:
        """Write plot and file."""
        if run.folder is None:
            return
        if self.layers:
            step = self.rows[-1]["step"]
            picture = draw_flow(self.layers, step)
            run.recorder.image("gradients/flow", picture, step)
            run.recorder.save_image(PICTURE, picture)
        layers, units = list(self.rows), list(self.unit_rows)
        self.write_json(
            run.folder, FILE, {"finding": self.finding, "layers": layers, "units": units}
        )


def _with_update(layer: Layer, update: float) -> Layer:
    if layer.norm is None or not layer.weight_norm:
        return layer
    return replace(layer, update_ratio=update / layer.weight_norm)


@dataclass
class _Units:
    """The state of one layer's units."""

    looks: Tensor  # consecutive looks at which a unit was always 0
    alive: Tensor | None = None  # in this step
    samples: int = 0  # in this step
    needed: int = 0  # consecutive looks until a unit is dead


class DeadUnits(TorchFunctionMode):
    """While entered, records which units of each ReLU's output were ever non-zero.

    It intercepts torch calls (`x.relu()` as well as `nn.ReLU`) in uncompiled code. Units belong to
    the last layer with parameters that ran before. It does not synchronise or change the
    computation.
    """

    def __init__(self, model: nn.Module, after: int) -> None:
        super().__init__()
        self.after = after  # consecutive looks
        self.owners = {
            id(parameter): prefix or "model"
            for prefix, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self.layers: dict[str, _Units] = {}
        self.watching = False
        self.layer, self.dimension = "", -1

    def begin(self) -> None:
        """Start a step."""
        self.watching, self.layer = True, ""
        for layer in self.layers.values():
            layer.alive, layer.samples = None, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.watching and isinstance(output, Tensor):
            name = getattr(func, "__name__", "")
            relu6 = name == "hardtanh" and [*args[1:2], kwargs.get("min_val")][0] == 0
            if name in RELUS or relu6:
                self._record(output)
            else:
                owners = [self.owners.get(id(value)) for value in (*args, *kwargs.values())]
                if name != "__get__" and any(owners):  # not a parameter's attribute access
                    self.layer = next(filter(None, owners))
                    self.dimension = 1 if name.startswith(CHANNELS) else -1
        return output

    def _record(self, output: Tensor) -> None:
        if not self.layer or output.dim() < 2 or not output.numel():
            return
        unit = 1 if output.dim() > 3 else self.dimension % output.dim()
        rest = [i for i in range(output.dim()) if i != unit]
        alive = output.detach().amax(rest) != 0  # ReLU outputs are ≥ 0; NaN counts as non-zero
        layer = self.layers.get(self.layer)
        if layer is None or layer.looks.shape != alive.shape:
            layer = self.layers[self.layer] = _Units(torch.zeros_like(alive, dtype=torch.int32))
        layer.alive = alive if layer.alive is None else layer.alive | alive
        layer.samples += len(output)

    def count(self, skipped: Tensor) -> Tensor:
        """Return the dead units per layer, on the device; a skipped step does not count.

        In the order of `self.layers`, which must not be empty.
        """
        dead = []
        for layer in self.layers.values():
            if layer.alive is not None:
                again = torch.where(layer.alive, 0, layer.looks + 1)
                layer.looks = torch.where(skipped > 0, layer.looks, again)
                layer.needed = max(self.after, -(-SAMPLES // layer.samples))
            dead.append((layer.looks >= layer.needed).sum())
        self.watching = False
        return torch.stack([number.to(skipped.device, torch.float32) for number in dead])

    def describe(self, dead: Iterable[float]) -> dict[str, tuple[int, int]]:
        """Return (dead units, units) by layer, from the result of `count` on the host."""
        pairs = zip(self.layers.items(), dead, strict=True)
        return {name: (int(number), len(layer.looks)) for (name, layer), number in pairs}
