"""Looks at gradients: right numbers, right verdicts, and a run that is none the worse for them."""

import itertools
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from runner import train
from runner.core.build.setup import Components
from runner.core.record.summary import Summary
from runner.core.schemas.debug import FaultThresholds, GradientsConfig
from runner.diagnose.debug.gradient_layers import LayerState, check_gradients
from runner.diagnose.debug.gradients import DeadUnitDetector
from tests import runs

DIGITS = ["data=digits", "training.batch_size=32"]
LOOKING = [*DIGITS, "debug=gradients", "debug.every=2", "training.steps=12"]


class Net(nn.Module):
    """Layers in a row, and one that is left out."""

    def __init__(self, *layers: nn.Module, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), *layers)
        if unused:
            self.left_out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def mlp(unused: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), unused=unused)


def trained(overrides: list[str], folder: Path, model: nn.Module | None = None) -> Summary:
    return runs.trained(*overrides, folder=folder, given=Components(model=model))


def rows(folder: Path, kind: str = "layers") -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = runs.debug_file(folder, "gradients")[kind]
    return content


# -- numbers ---------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_definitions() -> None:
    model = mlp()
    model(torch.randn(8, 64)).square().mean().backward()
    with torch.no_grad():
        model.layers[1].weight.grad[0] = 0.0
        model.layers[3].bias.grad[3] = math.inf
    report = check_gradients(model)
    for layer, (name, parameter) in zip(report.layers, model.named_parameters(), strict=True):
        gradient = parameter.grad
        assert gradient is not None
        assert layer.name == name
        assert layer.largest == pytest.approx(float(gradient.abs().max()))
        assert layer.zeros == pytest.approx(float((gradient == 0).float().mean()), abs=1e-7)
        assert layer.non_finite == pytest.approx(float((~gradient.isfinite()).float().mean()))
        assert layer.weight_norm == pytest.approx(float(parameter.detach().norm()))
        if gradient.isfinite().all():
            assert layer.norm == pytest.approx(float(gradient.norm()))
            assert layer.mean == pytest.approx(float(gradient.mean()), abs=1e-8)
            assert layer.std == pytest.approx(float(gradient.std(correction=0)), rel=1e-4)
            assert layer.ratio == pytest.approx(float(gradient.norm() / parameter.detach().norm()))
    assert report.problems == ["layers.3.bias: not finite"]


def test_sparse_complex_half_and_empty_gradients_have_their_own_statistics() -> None:
    model = nn.Module()
    model.table = nn.Embedding(10, 4, sparse=True)
    model.spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model.small = nn.Parameter(torch.full((4,), 200.0, dtype=torch.float16))
    model.none = nn.Parameter(torch.zeros(0, 10))  # without values, as a layer of no units has
    loss = model.table(torch.tensor([1, 1, 7])).sum() + model.spectrum.abs().sum()
    (loss + (model.small * model.small).float().sum() + model.none.sum()).backward()
    table, spectrum, half, none = sorted(check_gradients(model).layers, key=lambda x: -x.size)
    assert (table.name, table.size) == ("table.weight", 40)
    assert table.norm == pytest.approx(math.sqrt(4 * 2**2 + 4 * 1**2))
    assert table.zeros == pytest.approx(0.8)
    assert table.mean == pytest.approx(12 / 40)
    assert spectrum.norm == pytest.approx(math.sqrt(3))
    assert half.norm == pytest.approx(800.0)  # whose square is beyond fp16
    assert (none.state, none.norm, none.zeros) == (LayerState.FINE, None, None)


def test_what_no_optimizer_has_and_what_gets_no_gradient_are_named() -> None:
    model = mlp(unused=True)
    optimizer = torch.optim.SGD(model.layers[1].parameters(), 0.1)
    model(torch.randn(8, 64)).sum().backward()
    report = check_gradients(model, optimizer)
    assert report.problems == [
        "layers.3.weight: in no optimizer",
        "layers.3.bias: in no optimizer",
        "left_out.weight: no gradient",
        "left_out.bias: no gradient",
    ]
    names = "left_out.weight and 1 more: no gradient; layers.3.weight and 1 more: in no optimizer"
    assert names in str(report)
    assert check_gradients(nn.ReLU()).problems == []


@pytest.mark.parametrize(
    ("bounds", "state"),
    [
        ({"exploding": FaultThresholds(1e-9, None)}, LayerState.EXPLODING),
        ({"vanishing": FaultThresholds(1e9, None)}, LayerState.VANISHING),
        ({"vanishing": FaultThresholds(None, 1e9)}, LayerState.VANISHING),
        (
            {"vanishing": FaultThresholds(None, None), "exploding": FaultThresholds(None, None)},
            LayerState.FINE,
        ),
    ],
)
def test_each_bound_can_be_set(bounds: dict[str, FaultThresholds], state: LayerState) -> None:
    model = mlp()
    model(torch.randn(8, 64)).sum().backward()
    assert check_gradients(model, config=GradientsConfig(**bounds)).layers[0].state is state


# -- in a run --------------------------------------------------------------------------------------


def test_the_update_ratio_is_how_far_the_weights_moved(tmp_path: Path) -> None:
    plain = (
        "optimization=none optimizer.name=SGD optimizer.lr=0.1 optimizer.weight_decay=0 "
        "stability.clip_norm=null schedule=constant training.steps=2 model=mlp"
    ).split()
    trained([*LOOKING, *plain], tmp_path)
    for row in rows(tmp_path):
        rate = row["update_ratio"] / row["ratio"]
        assert rate == pytest.approx(0.1, rel=0.02) or row["norm"] < 1e-6


def test_an_fp16_loss_scale_is_divided_out(tmp_path: Path) -> None:
    def first_look(folder: Path, *more: str) -> list[float]:
        trained([*LOOKING, "model=mlp", "training.steps=2", "debug.every=1", *more], folder)
        return [row["norm"] for row in rows(folder) if row["step"] == 1]

    half = ["optimization=custom", "optimization.amp.enabled=true", "optimization.amp.dtype=fp16"]
    scaled = first_look(tmp_path / "a", *half)
    assert scaled == pytest.approx(first_look(tmp_path / "b", "optimization=none"), rel=0.05)


def test_dying_units_and_unused_parameters_are_named_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp(unused=True)
    with torch.no_grad():
        model.layers[1].bias[:20] = -100.0
    caplog.set_level("INFO", "runner")
    summary = trained([*LOOKING, "optimization=basic"], tmp_path, model)
    found = runs.finding(summary, "gradients")
    assert "left_out.weight and 1 more: no gradient" in found
    assert "layers.1: 20 of 32 units dead" in found
    assert summary.status == "done" and summary.faults["no_gradient"] == 1
    assert summary.faults["dead_units"] == 3  # fewer than 128 samples would say too little
    assert len(runs.faults(tmp_path, "dead_units")) == 1
    (line,) = [r.getMessage() for r in caplog.records if "left_out" in r.getMessage()]
    assert "no gradient in any of 3 checks: left_out.weight and left_out.bias" in line
    assert rows(tmp_path, "units")[-1] == {"step": 12, "layer": "layers.1", "dead": 20, "units": 32}
    assert (tmp_path / "debug" / "plots" / "gradient_flow.png").read_bytes().startswith(b"\x89PNG")
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert "watch_gradients/flow" in {*tags["images"], *tags["tensors"]}
    for chart in ("norm/layers.1.weight", "update_ratio/layers.1.weight", "dead_units/layers.1"):
        assert len(runs.scalars(tmp_path, f"watch_gradients/{chart}")) == 6


@pytest.mark.slow
def test_a_layer_behind_saturated_sigmoids_vanishes_in_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hidden = [m for _ in range(10) for m in (nn.Linear(16, 16), nn.Sigmoid())]
    summary = trained(LOOKING, tmp_path, Net(nn.Linear(64, 16), *hidden, nn.Linear(16, 10)))
    assert " more: vanishing" in runs.finding(summary, "gradients")
    faults = runs.faults(tmp_path, "vanishing_gradient")
    named = {fault["message"].split(":")[0] for fault in faults}
    assert "layers.1.weight" in named and "layers.22.weight" not in named


def test_an_exploding_gradient_is_named(tmp_path: Path) -> None:
    calls, model = itertools.count(), mlp()

    def amplify(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if module.training and next(calls) >= 9:
            output.register_hook(lambda gradient: 1e6 * gradient)

    model.register_forward_hook(amplify)
    summary = trained([*LOOKING, "stability=off"], tmp_path, model)
    assert " more: exploding" in runs.finding(summary, "gradients")
    assert summary.faults["exploding_gradient"] > 0


def test_frozen_and_tied_weights_and_those_trained_now_and_then(tmp_path: Path) -> None:
    class Odd(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = self.layers[:3](x)
            x = nn.functional.relu(nn.functional.linear(x, self.layers[3].weight.T))
            return self.now(x) if self.calls % 4 == 0 else self.layers[5](x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Odd(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    model.layers[5].weight.requires_grad_(False)
    model.layers[1].bias = model.layers[3].bias  # tied
    model.now = nn.Linear(16, 10)
    summary = trained(LOOKING, tmp_path, model)
    assert summary.status == "done"
    known = {f"layers.{name}" for name in ("1.weight", "1.bias", "3.weight", "5.bias")}
    assert {row["layer"] for row in rows(tmp_path)} == known | {"now.weight", "now.bias"}
    seen = {(row["layer"], row["state"]) for row in rows(tmp_path)}
    assert {("now.weight", "fine"), ("now.weight", "no gradient")} <= seen
    assert "no_gradient" not in summary.faults


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ("4 debug.gradients.every=3",
         "1 check, but a verdict needs 3: lower debug.gradients.every"),
        ("2", "2 checks, but a verdict needs 3: train longer"),
        ("60", "no problems found"),
    ],
)  # fmt: skip
def test_too_few_looks_are_said_and_a_short_run_has_enough(
    steps: str, found: str, tmp_path: Path
) -> None:
    short = [*DIGITS, "model=mlp", "optimization=none", "debug=gradients"]
    short += f"training.steps={steps}".split()
    summary = trained(short, tmp_path)
    assert runs.finding(summary, "gradients") == found
    assert runs.debug_file(tmp_path, "gradients")["finding"] == found
    if steps == "60":
        assert next(tool.looks for tool in summary.tools if tool.name == "gradients") == 6


def test_a_skipped_step_says_which_layer_is_not_finite_and_nothing_of_updates(
    tmp_path: Path,
) -> None:
    model = mlp()
    factors = iter([1.0])
    model.layers[3].bias.register_hook(lambda g: g * next(factors, math.nan))
    summary = trained([*LOOKING, "training.steps=2", "training.validate_every=9"], tmp_path, model)
    states = {row["layer"]: (row["state"], row["update_ratio"]) for row in rows(tmp_path)}
    assert states["layers.3.bias"] == ("not finite", None)
    assert states["layers.1.weight"] == ("fine", None)
    assert runs.finding(summary, "gradients") == "layers.3.bias: not finite"


def test_it_rests_after_max_iterations_and_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    trained([*LOOKING, "model=mlp", "debug.max_iterations=7"], tmp_path / "rests")
    assert {row["step"] for row in rows(tmp_path / "rests")} == {2, 4, 6}
    (tmp_path / "debug").write_text("in the way")
    assert trained([*LOOKING, "model=mlp", "training.steps=4"], tmp_path).status == "done"


# -- units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "units"),
    [
        (nn.Conv1d(3, 5, 1), (200, 3, 7), 5),
        (nn.Conv2d(3, 5, 1), (200, 3, 7, 7), 5),
        (nn.Linear(7, 5), (200, 3, 7), 5),
    ],
)
@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.ReLU6()])
def test_units_of_a_relu_are_channels_or_features(
    layer: nn.Module, shape: tuple[int, ...], units: int, activation: nn.Module
) -> None:
    with torch.no_grad():
        layer.bias[:2] = -100.0
    model = nn.Sequential(layer, activation)
    seen = DeadUnitDetector(model, dead_after=2)
    for _ in range(3):
        seen.start_step()
        with seen:
            model(torch.randn(shape))
        dead = seen.count_dead(torch.tensor(0.0))
    assert seen.counts_by_layer(dead.tolist()) == {"0": (2, units)}


def test_a_skipped_step_and_a_few_samples_say_nothing_of_units() -> None:
    model = nn.Linear(4, 6)
    with torch.no_grad():
        model.bias[:] = -100.0
    units = DeadUnitDetector(model, dead_after=1)

    def look(samples: int, skipped: float) -> float:
        units.start_step()
        with units:
            model(torch.randn(samples, 4)).relu()
        return float(units.count_dead(torch.tensor(skipped)))

    assert [look(200, 1.0), look(64, 0.0), look(64, 0.0)] == [0.0, 0.0, 6.0]


@pytest.mark.slow
def test_it_works_beside_a_whole_step_graph(tmp_path: Path) -> None:
    overrides = ["optimization=ultra", "model=mlp", "debug=full", "training.steps=60"]
    overrides.append("optimization.measure=false")
    with runs.opened(*DIGITS, *overrides, folder=tmp_path) as run:
        summary = train(run)
    assert (summary.status, summary.faults) == ("done", {})
    assert run.step_graph is not None and run.step_graph.steps >= 6
    assert sorted({row["step"] for row in rows(tmp_path)}) == [10, 20, 30, 40, 50, 60]
    findings = {tool.name: tool.finding for tool in summary.tools}
    assert findings["gradients"] == "no problems found" and "activations" in findings["memory"]
    assert "operators a step" in findings["profile"] or "of the operators" in findings["profile"]
    assert findings["gradcheck"].endswith(", 0 wrong")
    assert findings["anomaly"].startswith("no NaN or Inf")


def test_a_resumed_run_draws_the_last_inspection_though_none_follows(tmp_path: Path) -> None:
    typed = [*runs.TABLE, "debug=gradients", "debug.every=5", "training.steps=9",
             "checkpoint.every=2", "checkpoint.resume=auto"]  # fmt: skip
    with suppress(runs.Killed):
        runs.trained(*typed, folder=tmp_path, hooks=[runs.AtSteps(7, runs.kill)])
    picture = tmp_path / "debug/plots/gradient_flow.png"
    picture.unlink(missing_ok=True)  # a killed process draws none
    runs.trained(*typed, folder=tmp_path)
    assert picture.exists()
