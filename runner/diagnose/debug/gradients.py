"""Track each layer's gradient, weight and update: vanishing, exploding, dead, untrained."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.core.format import count_noun, join_names
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.schemas.debug import DebugConfig
from runner.diagnose.debug.gradient_layers import (
    FAULTS,
    DeadUnitCounts,
    Layer,
    LayerState,
    NamedTensors,
    build_layers,
    classify_layers,
    draw_gradient_flow,
    gradient_statistics,
    select_weights,
    stacked_norms,
    summarize_faults,
)
from runner.diagnose.debug.tool import DebugTool

FILE, PLOT_FILE = "debug/gradients.json", "debug/plots/gradient_flow.png"
MAX_CHARTS = 48  # per chart kind, in TensorBoard
MIN_INSPECTIONS = 3  # until an untrained or vanishing layer is a fault
NORM_HISTORY = 20  # inspections; their median is a layer's usual norm
MAX_LOGGED = 5  # layers per fault that are logged; all are in history.json
MAX_ROWS = 20_000  # in the file, newest: about 5 MB; one per layer and inspection
REPORTED_STATES = (LayerState.EXPLODING, LayerState.VANISHING)  # the guard reports non-finite ones
# activations with zero gradient where the output is 0, unlike leaky ReLU or GELU
RELU_FUNCTIONS = {"relu", "relu_", "relu6", "_threshold", "threshold_"}
# functions whose units are in dimension 1
CHANNEL_FUNCTIONS = ("conv", "batch_norm", "instance_norm", "group_norm")
MIN_SAMPLES = 128  # per verdict, since some units are rarely active


@dataclass
class _Inspection:
    """The tensors of a step after its backward, on the device."""

    step: int
    skipped: Tensor
    named: NamedTensors
    statistics: Tensor | None
    old_weights: list[Tensor]  # before the update


class GradientsTool(DebugTool):
    """Inspects all layers every `debug.gradients.every` steps.

    These steps leave a compiled whole-step graph, and run uncompiled if the model has ReLUs, to see
    their outputs. An inspection keeps a copy of the weights until the update, reads all numbers in
    one transfer, and does not change the computation.
    """

    name = "gradients"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.gradients.every)
        self.settings = config.gradients
        self.detector: DeadUnitDetector | None = None
        self.pending: _Inspection | None = None  # waiting for the step's update
        self.layer_rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)  # for the file
        self.unit_rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)  # of dead units
        self.layers: list[Layer] = []  # at the last inspection
        self.dead_units: DeadUnitCounts = {}
        self.norm_history: dict[str, deque[float]] = {}  # gradient norms
        self.vanishing_counts: Counter[str] = Counter()  # consecutive inspections
        self.untrained: list[str] = []  # layers that never had a gradient
        self.faulty_layers: dict[LayerState, dict[str, None]] = {}  # by state
        self.zero_counts: dict[str, list[int]] = {}  # of the detector in a checkpoint

    def state(self) -> dict[str, Any]:
        """Return all rows and counts."""
        return {
            "rows": [list(self.layer_rows), list(self.unit_rows)],
            "layers": [asdict(layer) for layer in self.layers],
            "norms": {name: list(norms) for name, norms in self.norm_history.items()},
            "vanishing": self.vanishing_counts,
            "untrained": self.untrained,
            "faulty": {state: list(names) for state, names in self.faulty_layers.items()},
            "zeros": self.zero_counts if self.detector is None else self.detector.counts(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the rows and counts."""
        self.layer_rows.extend(state["rows"][0])
        self.unit_rows.extend(state["rows"][1])
        rows = state["layers"]
        self.layers = [Layer(**{**row, "state": LayerState(row["state"])}) for row in rows]
        norms, faulty = state["norms"].items(), state["faulty"].items()
        self.norm_history = {name: deque(values, NORM_HISTORY) for name, values in norms}
        self.vanishing_counts, self.untrained = Counter(state["vanishing"]), state["untrained"]
        self.faulty_layers = {LayerState(fault): dict.fromkeys(names) for fault, names in faulty}
        self.zero_counts = state["zeros"]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Write plot and file at the end, even after an error."""
        if self.settings.dead_after:
            self.detector = DeadUnitDetector(run.model, self.settings.dead_after)
            self.detector.zero_counts = self.zero_counts
        self.eager = self.detector is not None
        self.finding = self._build_finding()
        try:
            yield
        finally:
            if self.inspections < MIN_INSPECTIONS:
                self._report_untrained(run)
            self._write_files(run)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Observe ReLU outputs; judge the layers after the update."""
        self.pending = None
        if self.detector is not None:
            self.detector.start_step()
        with self.detector or nullcontext():
            yield
        self._finish_inspection(run, self.pending)

    def on_gradients(self, run: Run, step: Step) -> None:
        """Measure gradients on the device, before the update overwrites them."""
        named: NamedTensors = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        gradients = [p.grad for _, p in named if p.grad is not None]
        scale = run.update.scale.value if run.update.scale else None
        with torch.no_grad():
            statistics = gradient_statistics(gradients, scale) if gradients else None
            old_weights = [p.detach().clone() for _, p in named]
        self.pending = _Inspection(step.number, step.skipped, named, statistics, old_weights)

    def _finish_inspection(self, run: Run, inspection: _Inspection | None) -> None:
        if inspection is None:
            return
        self.inspections += 1
        with torch.no_grad():
            self._classify(run, inspection.step, self._read_layers(inspection))
        self._write_scalars(run, inspection.step)
        if self.detector is not None and not self.detector.layers:
            self.detector, self.eager = None, False  # no ReLUs

    def _read_layers(self, inspection: _Inspection) -> list[Layer]:
        """Read weights, updates, skip flag, dead units and statistics in one transfer."""
        weights = stacked_norms(inspection.old_weights)
        torch._foreach_sub_(inspection.old_weights, [p.detach() for _, p in inspection.named])
        updates = stacked_norms(inspection.old_weights)
        units = self.detector.layers if self.detector is not None else {}
        parts = [weights, updates, inspection.skipped.reshape(1).float()]
        if self.detector is not None and units:
            parts.append(self.detector.count_dead(inspection.skipped))
        if inspection.statistics is not None:
            parts.append(inspection.statistics.flatten())
        numbers = iter(torch.cat([part.to(weights.device) for part in parts]).tolist())  # waits
        old_norms, update_norms = (list(islice(numbers, len(weights))) for _ in range(2))
        skipped, dead = next(numbers) > 0, list(islice(numbers, len(units)))
        self.dead_units = {} if self.detector is None else self.detector.counts_by_layer(dead)
        layers = build_layers(inspection.named, list(numbers), old_norms)
        for i, update in enumerate([] if skipped else update_norms):
            if layers[i].norm is not None and (weight_norm := layers[i].weight_norm):
                layers[i] = replace(layers[i], update_ratio=update / weight_norm)
        return layers

    # -- verdicts ------------------------------------------------------------------------------

    def _classify(self, run: Run, step: int, layers: list[Layer]) -> None:
        history = self.norm_history.items()
        usual_norms = {n: median(norms) for n, norms in history if len(norms) >= MIN_INSPECTIONS}
        self.layers = classify_layers(layers, self.settings, usual_norms)
        for layer in self.layers:
            self._record_layer_fault(run, step, layer)
            self.layer_rows.append({"step": step, **layer.as_dict()})
        for name, (dead, units) in self.dead_units.items():
            self.unit_rows.append({"step": step, "layer": name, "dead": dead, "units": units})
        for name, (dead, units) in self._dead_layers().items():
            text = f"{name}: {dead} of {units} units gave 0 for every sample in several checks"
            run.history.add("dead_units", text, step=step, category="numerics")
        untrained = [layer.name for layer in self.layers if layer.state is LayerState.NO_GRADIENT]
        self.untrained = [n for n in untrained if self.inspections == 1 or n in self.untrained]
        if self.inspections == MIN_INSPECTIONS:
            self._report_untrained(run)
        self.finding = self._build_finding()

    def _record_layer_fault(self, run: Run, step: int, layer: Layer) -> None:
        """Record the layer's fault; vanishing counts after MIN_INSPECTIONS in a row."""
        if layer.norm is not None and math.isfinite(layer.norm):
            self.norm_history.setdefault(layer.name, deque(maxlen=NORM_HISTORY)).append(layer.norm)
        state, count = layer.state, self.vanishing_counts[layer.name]
        self.vanishing_counts[layer.name] = count + 1 if state is LayerState.VANISHING else 0
        is_fault = state in (LayerState.NOT_FINITE, *REPORTED_STATES)
        if not is_fault or 0 < self.vanishing_counts[layer.name] < MIN_INSPECTIONS:
            return
        names = self.faulty_layers.setdefault(state, {})
        names[layer.name] = None
        if state in REPORTED_STATES:
            numbers = f"gradient norm {layer.norm:.3g}, of the weight {layer.weight_norm or 0:.3g}"
            text = f"{layer.name}: {state}, {numbers}"
            say = len(names) <= MAX_LOGGED
            run.history.add(FAULTS[state], text, step=step, category="numerics", say=say)

    def _dead_layers(self) -> DeadUnitCounts:
        share, counts = self.settings.dead_share, self.dead_units.items()
        return {name: (dead, units) for name, (dead, units) in counts if dead >= share * units}

    def _report_untrained(self, run: Run) -> None:
        """Report once the parameters that never had a gradient."""
        if self.untrained:
            text = f"no gradient in any of {self.inspections} checks: {join_names(self.untrained)}"
            run.history.add("no_gradient", text, step=run.progress.step, category="numerics")

    def _build_finding(self) -> str:
        """Summarise all faults, the dead units, and whether there were enough inspections."""
        names = {**self.faulty_layers, LayerState.NO_GRADIENT: dict.fromkeys(self.untrained)}
        if self.inspections >= MIN_INSPECTIONS or self.faulty_layers or self.untrained:
            return summarize_faults(names, self._dead_layers())
        remedy = f"lower debug.{'gradients.' if self.settings.every else ''}every"
        remedy = "train longer" if self.every == 1 else remedy
        checks = count_noun(self.inspections, "check")
        return f"{checks}, but a verdict needs {MIN_INSPECTIONS}: {remedy}"

    # -- pictures and files --------------------------------------------------------------------

    def _write_scalars(self, run: Run, step: int) -> None:
        values = {f"dead_units/{n}": dead / units for n, (dead, units) in self.dead_units.items()}
        for layer in select_weights(self.layers, MAX_CHARTS):
            for chart, value in (("norm", layer.norm), ("update_ratio", layer.update_ratio)):
                if value is not None:
                    values[f"{chart}/{layer.name}"] = value
        run.recorder.show(step, "gradients", values)

    def _write_files(self, run: Run) -> None:
        if run.folder is None:
            return
        if self.layers:
            step = self.layer_rows[-1]["step"]
            picture = draw_gradient_flow(self.layers, step)
            run.recorder.image("gradients/flow", picture, step)
            run.recorder.save_image(PLOT_FILE, picture)
        rows = {"layers": list(self.layer_rows), "units": list(self.unit_rows)}
        self.write_json(run.folder, FILE, {"finding": self.finding, **rows})


@dataclass
class _UnitActivity:
    """The state of one layer's units."""

    zero_inspections: Tensor  # consecutive ones at which a unit was always 0
    alive: Tensor | None = None  # in this step
    samples: int = 0  # in this step
    required: int = 0  # consecutive inspections until a unit is dead


class DeadUnitDetector(TorchFunctionMode):
    """While entered, records which units of each ReLU's output were ever non-zero.

    It intercepts torch calls (`x.relu()` as well as `nn.ReLU`) in uncompiled code. Units belong to
    the last layer with parameters that ran before. It does not synchronise or change the
    computation.
    """

    def __init__(self, model: nn.Module, dead_after: int) -> None:
        super().__init__()
        self.dead_after = dead_after  # consecutive inspections
        self.owners = {
            id(parameter): prefix or "model"
            for prefix, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self.layers: dict[str, _UnitActivity] = {}
        self.zero_counts: dict[str, list[int]] = {}  # to start with, in a resumed run
        self.recording = False
        self.current_layer, self.unit_dimension = "", -1

    def start_step(self) -> None:
        """Start a step."""
        self.recording, self.current_layer = True, ""
        for layer in self.layers.values():
            layer.alive, layer.samples = None, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.recording and isinstance(output, Tensor):
            name = getattr(func, "__name__", "")
            relu6 = name == "hardtanh" and [*args[1:2], kwargs.get("min_val")][0] == 0
            if name in RELU_FUNCTIONS or relu6:
                self._record(output)
            else:
                owners = [self.owners.get(id(value)) for value in (*args, *kwargs.values())]
                if name != "__get__" and any(owners):  # not a parameter's attribute access
                    self.current_layer = next(filter(None, owners))
                    self.unit_dimension = 1 if name.startswith(CHANNEL_FUNCTIONS) else -1
        return output

    def _record(self, output: Tensor) -> None:
        if not self.current_layer or output.dim() < 2 or not output.numel():
            return
        unit = 1 if output.dim() > 3 else self.unit_dimension % output.dim()
        other_dimensions = [i for i in range(output.dim()) if i != unit]
        # ReLU outputs are ≥ 0; NaN counts as non-zero
        alive = output.detach().amax(other_dimensions) != 0
        layer = self.layers.get(self.current_layer)
        if layer is None or layer.zero_inspections.shape != alive.shape:
            counts = torch.zeros_like(alive, dtype=torch.int32)
            if len(earlier := self.zero_counts.pop(self.current_layer, ())) == len(counts):
                counts = torch.tensor(earlier, dtype=torch.int32, device=counts.device)
            layer = self.layers[self.current_layer] = _UnitActivity(counts)
        layer.alive = alive if layer.alive is None else layer.alive | alive
        layer.samples += len(output)

    def count_dead(self, skipped: Tensor) -> Tensor:
        """Return the dead units per layer, on the device; a skipped step does not count.

        In the order of `self.layers`, which must not be empty.
        """
        dead = []
        for layer in self.layers.values():
            if layer.alive is not None:
                updated = torch.where(layer.alive, 0, layer.zero_inspections + 1)
                layer.zero_inspections = torch.where(skipped > 0, layer.zero_inspections, updated)
                layer.required = max(self.dead_after, -(-MIN_SAMPLES // layer.samples))
            dead.append((layer.zero_inspections >= layer.required).sum())
        self.recording = False
        return torch.stack([number.to(skipped.device, torch.float32) for number in dead])

    def counts(self) -> dict[str, list[int]]:
        """Return for each unit at how many inspections in a row it was always 0; a host sync."""
        own = {name: layer.zero_inspections.tolist() for name, layer in self.layers.items()}
        return {**self.zero_counts, **own}

    def counts_by_layer(self, dead: Iterable[float]) -> dict[str, tuple[int, int]]:
        """Return (dead units, units) by layer, from the result of `count_dead` on the host."""
        pairs = zip(self.layers.items(), dead, strict=True)
        return {name: (int(number), len(layer.zero_inspections)) for (name, layer), number in pairs}
