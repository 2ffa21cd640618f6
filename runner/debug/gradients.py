"""Each layer's gradient, weight and update: what vanishes, explodes, is dead or never trained."""

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
CHARTS = 48  # of one kind in TensorBoard
CONFIRMED = 3  # looks, after which what was never trained, or vanishes, is a fault
REMEMBERED = 20  # looks, whose median is what a layer's norm usually is
LOGGED = 5  # layers with the same fault that get a line in the log; all are in history.json
ROWS = 20_000  # of the file, the newest ones: about 5 MB; a row is a layer at one look
NAMED_FAULTS = (LayerState.EXPLODING, LayerState.VANISHING)  # the guard names what is not finite
# those whose gradient is 0 where their output is; that of a leaky one, or of GELU, is not
RELUS = {"relu", "relu_", "relu6", "_threshold", "threshold_"}
CHANNELS = ("conv", "batch_norm", "instance_norm", "group_norm")  # units are in dimension 1
SAMPLES = 128  # in a look; fewer say little of a unit that is rarely needed


@dataclass
class _Look:
    """The numbers of a step once its backward is through, on the device."""

    step: int
    skipped: Tensor
    named: Named
    statistics: Tensor | None
    before: list[Tensor]  # weights


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
        self.pending: _Look | None = None  # the step's, until its update is made
        self.rows: deque[dict[str, Any]] = deque(maxlen=ROWS)  # of the file: layers …
        self.unit_rows: deque[dict[str, Any]] = deque(maxlen=ROWS)  # … and dead units
        self.layers: list[Layer] = []  # as last seen
        self.dead: Dead = {}
        self.usual: dict[str, deque[float]] = {}  # gradient norms
        self.vanishing: Counter[str] = Counter()  # looks in a row
        self.never: list[str] = []  # had no gradient at any look
        self.faulty: dict[LayerState, dict[str, None]] = {}  # layers, by their fault

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """The picture and the file, also of a run that was cut off."""
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
        """See the outputs of ReLUs; judge once the update is made."""
        self.pending = None
        if self.units is not None:
            self.units.begin()
        with self.units or nullcontext():
            yield
        self._finish(run)

    def on_gradients(self, run: Run, step: Step) -> None:
        """Measure the gradients, on the device; the update may write over them."""
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
                self.units, self.eager = None, False  # there are no ReLUs

    def _read(self, look: _Look) -> list[Layer]:
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
            text = f"{name}: {gone} of {units} units gave 0 for every sample of several looks"
            run.history.add("dead_units", text, step=step, category="numerics")
        untrained = [layer.name for layer in self.layers if layer.state is LayerState.NO_GRADIENT]
        self.never = [name for name in untrained if first or name in self.never]
        if self.looks + 1 == CONFIRMED:
            self._report_untrained(run, CONFIRMED)
        self.finding = self._sum_up(looks=self.looks + 1)

    def _judge_layer(self, run: Run, step: int, layer: Layer) -> None:
        """Count the layer's fault; vanishing is one after some looks in a row."""
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
        """The layers with so many dead units that it is a fault."""
        share = self.knobs.dead_share
        return {n: (gone, units) for n, (gone, units) in self.dead.items() if gone >= share * units}

    def _report_untrained(self, run: Run, looks: int) -> None:
        """Name, once, the parameters that have never had a gradient."""
        if self.never:
            text = f"no gradient at any of {looks} looks: {listed(self.never)}"
            run.history.add("no_gradient", text, step=run.progress.step, category="numerics")

    def _sum_up(self, looks: int = 0) -> str:
        """All faults so far, how many units are dead now, and whether there were enough looks."""
        names = {**self.faulty, LayerState.NO_GRADIENT: dict.fromkeys(self.never)}
        if looks >= CONFIRMED or self.faulty or self.never:
            return summarize(names, self._dead_layers())
        remedy = f"lower debug.{'gradients.' if self.knobs.every else ''}every"
        remedy = "train longer" if self.every == 1 else remedy
        count = "1 look" if looks == 1 else f"{looks} looks"
        return f"{count}, and {CONFIRMED} are needed for a verdict: {remedy}"

    # -- pictures and files --------------------------------------------------------------------

    def _show(self, run: Run, step: int) -> None:
        """Scalars for TensorBoard."""
        values = {f"dead_units/{name}": gone / units for name, (gone, units) in self.dead.items()}
        for layer in select_weights(self.layers, CHARTS):
            for chart, value in (("norm", layer.norm), ("update_ratio", layer.update_ratio)):
                if value is not None:
                    values[f"{chart}/{layer.name}"] = value
        run.recorder.show(step, "gradients", values)

    def _write(self, run: Run) -> None:
        """Picture and file."""
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
    """Units of one layer."""

    looks: Tensor  # in a row at which a unit was 0 throughout
    alive: Tensor | None = None  # in this step
    samples: int = 0  # in this step
    needed: int = 0  # looks in a row, until a unit is dead


class DeadUnits(TorchFunctionMode):
    """While entered, notes which units of each ReLU's output were ever other than 0.

    It sees calls of torch, so `x.relu()` as well as `nn.ReLU`, in code that is not compiled. Units
    are those of the last layer with a parameter that ran before. Nothing is read, and nothing of
    the computation changes.
    """

    def __init__(self, model: nn.Module, after: int) -> None:
        super().__init__()
        self.after = after  # looks in a row
        self.owners = {
            id(parameter): prefix or "model"
            for prefix, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self.layers: dict[str, _Units] = {}
        self.watching = False
        self.layer, self.dimension = "", -1

    def begin(self) -> None:
        """Another step."""
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
                if name != "__get__" and any(owners):  # not an attribute of a parameter
                    self.layer = next(filter(None, owners))
                    self.dimension = 1 if name.startswith(CHANNELS) else -1
        return output

    def _record(self, output: Tensor) -> None:
        if not self.layer or output.dim() < 2 or not output.numel():
            return
        unit = 1 if output.dim() > 3 else self.dimension % output.dim()
        rest = [i for i in range(output.dim()) if i != unit]
        alive = output.detach().amax(rest) != 0  # none is below 0; a NaN is no zero
        layer = self.layers.get(self.layer)
        if layer is None or layer.looks.shape != alive.shape:
            layer = self.layers[self.layer] = _Units(torch.zeros_like(alive, dtype=torch.int32))
        layer.alive = alive if layer.alive is None else layer.alive | alive
        layer.samples += len(output)

    def count(self, skipped: Tensor) -> Tensor:
        """How many units of each layer are dead, on the device; of a skipped step nothing counts.

        In the order of `self.layers`, of which there must be one.
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
        """Dead units and all units, by layer, from what `count` gave."""
        pairs = zip(self.layers.items(), dead, strict=True)
        return {name: (int(number), len(layer.looks)) for (name, layer), number in pairs}
