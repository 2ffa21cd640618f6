"""What is tried, timed or looked at on a model leaves nothing behind, and can be pinned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import train
from runner.core.build.setup import Components
from runner.core.device import device, process
from runner.core.interfaces.run import Run
from runner.core.objectives.custom import CustomObjective
from runner.core.techniques import pipeline
from runner.core.train.evidence import collect_evidence
from tests import runs

QUICK = ["data=digits", "training.batch_size=32", "training.steps=4", "device.threads=null"]
MIN_STEPS = "optimization.compile.min_steps"
LEVELS = {
    "default": [],
    "ultra": ["optimization=ultra", "optimization.whole_step.enabled=false", f"{MIN_STEPS}=null"],
    "memory": ["optimization=memory_efficient", "optimization.accumulation.micro_batch=null"],
    "debug": ["optimization=none", "debug=full"],
}
calls = 0  # forwards of all models and their copies: no copy and no restoring hides any


class Large(nn.Module):
    """Stands for a model of whose activations those of eight samples fit into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise torch.OutOfMemoryError("out of memory")
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


def test_a_trial_that_runs_out_of_memory_does_not_end_the_run() -> None:
    given = Components(model=Large())
    with runs.opened(*QUICK, "optimization=advanced", given=given) as run:
        (choice,) = [c for c in run.choices if c.key == MIN_STEPS]
        assert "a forward does not fit in memory" in choice.reason
        train(run)
        assert run.micro_batch == 8


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Extractor:
    """Keeps what a layer puts out, as a hook that belongs to another object."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def save(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)


class Busy(nn.Module):
    """Each forward changes all that a model can hold."""

    total = 0
    shapes: list[torch.Size] = []

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 10)
        )
        self.tied = nn.Linear(64, 16)
        self.tied.weight = self.layers[1].weight
        self.teacher = nn.Parameter(torch.zeros(10), requires_grad=False)
        self.forwards, self.outputs, self.cache = 0, [], {}  # type: ignore[var-annotated]
        self.numbers, self.position = SimpleNamespace(forwards=0), itertools.count()
        self.slots, self.extractor = Slots(), Extractor()
        self.layers[1].register_forward_hook(self.extractor.save)
        self.layers[4].register_forward_hook(self._hook())

    def _hook(self) -> Callable[..., None]:
        times = 0

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal times
            times += 1
            hook.seen.append(times)  # type: ignore[attr-defined]

        hook.seen = self.seen = []  # type: ignore[attr-defined, var-annotated]
        self.times = lambda: times
        return hook

    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        type(self).total += 1
        self.shapes.append(x.shape)
        self.forwards += 1
        self.outputs.append(x)
        self.cache[self.forwards] = next(self.position)
        self.numbers.forwards += 1
        self.slots.count += 1
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(), persistent=False)
            self.tied.weight.register_hook(lambda gradient: gradient)
        with torch.no_grad():
            self.teacher += 1
        return self.layers(x) + 0 * self.tied(x.flatten(1)).mean()  # type: ignore[no-any-return]

    def state(self) -> list[Any]:
        """All of it, in values that can be compared."""
        return [
            (type(self).total, len(self.shapes)),
            (self.forwards, len(self.outputs), self.cache, sorted(vars(self))),
            (self.numbers.forwards, self.slots.count, repr(self.position)),
            (self.times(), self.seen, len(self.extractor.outputs)),
            self.tied.weight._backward_hooks,
            {name: value.tolist() for name, value in self.state_dict().items()},
            [(module.training, len(module._forward_hooks)) for module in self.modules()],
            [(p.requires_grad, p.grad) for p in self.parameters()],
            self.tied.weight is self.layers[1].weight,
        ]


def chosen(run: Run) -> dict[str, Any]:
    return {choice.key: choice.value for choice in run.choices}


@pytest.mark.parametrize("level", LEVELS)
def test_building_a_run_and_looking_at_it_change_nothing_that_a_model_holds(level: str) -> None:
    model, losses = Busy(), [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses[0] += 1
        return nn.functional.cross_entropy(output, target)

    before, noise = model.state(), torch.get_rng_state()
    given = Components(model, objective=CustomObjective(loss, "loss", "loss_fn"))
    with runs.opened(*QUICK, *LEVELS[level], given=given) as run:
        assert model.state() == before and losses == [0]
        assert torch.equal(torch.get_rng_state(), noise)
        collect_evidence(run)
        assert model.state() == before and losses == [0]
        assert not any("could not be" in row.reason for row in run.evidence.values())


GPT = [
    *["data=stdlib_text", "data.sequence=16", "data.validation_samples=8", "device.threads=null"],
    *["training.batch_size=4", "training.steps=2", "model=gpt"],
    *["model.width=32", "model.heads=2", "model.depth=2", "optimization=ultra"],
    *["optimization.amp.dtype=bf16", f"{MIN_STEPS}=null", "optimization.measure=false"],
    *["optimization.whole_step.enabled=false", "optimization.accumulation.enabled=true"],
    "optimization.system.small_mflop=0",
]
PINS = {
    "device.threads": 1,
    MIN_STEPS: 1_000_000,
    "optimization.attention.kernel": "plain",
    "training.micro_batch": 2,
    "data.workers": 0,
}


def test_timed_and_predicted_choices_are_recorded_and_pinned_ones_are_not_timed(
    machine: Callable[[Callable[[], float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with runs.opened(*GPT) as run:
        assert PINS.keys() <= chosen(run).keys()
        assert all(choice.reason for choice in run.choices)

    def never(*_: object) -> float:
        raise AssertionError("a pinned choice was timed")

    machine(never)
    monkeypatch.setattr(process, "busy_cores", never)
    with runs.opened(*GPT, *(f"{key}={value}" for key, value in PINS.items())) as run:
        assert chosen(run).get("data.workers", 0) == 0
        assert not (PINS.keys() - {"data.workers", "training.micro_batch"}) & chosen(run).keys()
        assert run.micro_batch == 2
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("held", ["generator", "file"])
def test_a_model_that_cannot_be_restored_is_not_called_and_the_reason_is_given(
    held: str, tmp_path: Path
) -> None:
    model, first = Busy(), calls
    with ExitStack() as stack:
        model.held = {  # type: ignore[assignment]
            "generator": lambda: (number for number in range(9)),
            "file": lambda: stack.enter_context((tmp_path / "log").open("w")),
        }[held]()
        asked = [*QUICK, "optimization.amp.dtype=bf16"]
        run = stack.enter_context(runs.opened(*asked, given=Components(model)))
        (choice,) = [c for c in run.choices if c.key == MIN_STEPS]
        assert choice.value == 30_000  # a rule's
        assert "the model is not timed" in choice.reason
        assert "cannot be restored" in choice.reason
        assert calls == first
        threads = next(c.reason for c in run.choices if c.key == "device.threads")
        assert "forward cost unknown: it holds" in threads
        assert train(run).status == "done"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], float]], None]:
    """Gives all that is timed before a run another clock."""

    def clocked(clock: Callable[[], float]) -> None:
        for module in (device, pipeline):
            monkeypatch.setattr(module, "perf_counter", clock)

    return clocked


@pytest.mark.parametrize("level", ["default", pytest.param("ultra", marks=pytest.mark.slow)])
def test_the_number_of_probing_calls_does_not_depend_on_the_machine(
    level: str, machine: Callable[[Callable[[], float]], None]
) -> None:
    called, decided = [], []
    for seconds in (1e-3, 1.0):  # from one reading of the clock to the next
        machine(itertools.count(0.0, seconds).__next__)
        first = calls
        steps = "training.steps=1_000_000"  # so many that compiling could pay
        with runs.opened(*QUICK, *LEVELS[level], steps, given=Components(Busy())) as run:
            called.append(calls - first)
            decided.append(chosen(run))
    assert called[0] == called[1] > 0
    if level == "default":  # what was timed is noted
        assert decided[0][MIN_STEPS] > decided[1][MIN_STEPS] > 0
