"""job=evaluate: int8 metrics beside the float ones, and files that give back the same outputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner import compose
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import call_model, slice_rows
from runner.core.jobs import evaluate as job
from runner.core.record.summary import Summary
from runner.core.techniques import quantization
from runner.core.techniques.quantization import INT8_LEVELS, product_levels
from tests import runs

INT8 = "optimization.quantization.enabled=true"
TEXT = ["data=stdlib_parts", "model=classifier", "model.width=64", "model.depth=1",
        "data.validation_samples=24", "training.steps=2", "training.batch_size=8"]  # fmt: skip
MODELS = '''
import torch
from torch import nn


class Branching(nn.Module):
    """What it does depends on the values, which no trace sees."""

    def __init__(self, in_features, classes):
        super().__init__()
        self.layer = nn.Linear(in_features, classes)
        self.calls = 0

    def forward(self, x):
        y = self.layer(x.flatten(1))
        if y.sum().abs() > 1e9:
            return y * 2
        self.calls += 1
        return y + self.calls * (not self.training)
'''


def asked(folder: Path, *more: str) -> tuple[str, ...]:
    return "job=evaluate", f"checkpoint.resume={folder}", "training.steps=40", *more


def evaluated(folder: Path, to: Path, *more: str) -> Summary:
    return job.main(runs.config(*asked(folder, *more)), to)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the default model, with averaged weights."""
    folder = tmp_path_factory.mktemp("mlp")
    runs.trained("training.steps=40", "optimizer.ema=0.9", folder=folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose inputs go by name."""
    folder = tmp_path_factory.mktemp("text")
    runs.trained(*TEXT, folder=folder)
    return folder


def load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        return torch.jit.load(path) if path.suffix == ".ts" else torch.export.load(path).module()


@pytest.mark.parametrize(
    ("kind", "file", "which"),
    [("torchscript", "model.ts", "text"), ("export", "model.pt2", "mlp")],
)
def test_the_file_holds_the_evaluated_model_for_batches_of_any_size(
    kind: str, file: str, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(which)
    more = ["optimizer.ema=0.9"] if which == "mlp" else TEXT
    summary = evaluated(folder, tmp_path, *more, f"evaluate.export={kind}")
    path = tmp_path / "exports" / file
    assert summary.export["file"] == f"exports/{file}"
    assert summary.export["bytes"] == path.stat().st_size
    assert summary.export["largest_difference"] < 1e-4
    assert Summary.read(tmp_path).export == summary.export
    assert f"exports/{file}" in (tmp_path / "report.md").read_text()
    loaded = load(path)
    with runs.opened(*asked(folder, *more)) as run, torch.no_grad(), run.update.averaged():
        inputs = next(run.validation.batches(0))[0]
        assert isinstance(inputs, dict) is (which == "text")
        run.model.eval()
        for some in (slice_rows(inputs, slice(5)), slice_rows(inputs, slice(7))):
            expected = run.model(**some) if which == "text" else run.model(some)
            torch.testing.assert_close(call_model(loaded, some), expected)


def test_int8_metrics_stand_in_the_summary_and_the_float_ones_in_the_evidence(
    mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # at this width it is slower
    monkeypatch.setattr(quantization, "_latency_ratio", lambda *_: 0.5)
    plain = evaluated(mlp, tmp_path / "float", "optimizer.ema=0.9")
    int8 = evaluated(mlp, tmp_path / "int8", "optimizer.ema=0.9", INT8)
    row = runs.status(int8, "quantization")
    assert row.engaged and row.evidence["int8"] == int8.metrics["val/accuracy"]
    assert row.evidence["float_metrics"]["val/loss"] == plain.metrics["val/loss"]
    assert int8.metrics["val/loss"] != plain.metrics["val/loss"]
    assert int8.metrics["val/loss"] == pytest.approx(plain.metrics["val/loss"], rel=0.02)
    assert plain.export == int8.export == {}


def test_the_quantised_state_is_int8_in_a_safetensors_file(mlp: Path, tmp_path: Path) -> None:
    more = ["optimizer.ema=0.9", INT8, "evaluate.export=quantized"]
    summary = evaluated(mlp, tmp_path, *more)
    state = load_file(tmp_path / summary.export["file"])
    assert state["layers.0.quantized"].dtype is torch.int8
    assert summary.export["model"] == "int8"
    with runs.opened(*asked(mlp, "optimizer.ema=0.9")) as run, run.update.averaged():
        weight = run.model.get_submodule("layers.0").weight.detach()
        again = state["layers.0.quantized"] * state["layers.0.scale"][:, None]
        bound = 0.01 if product_levels("cpu") == INT8_LEVELS else 0.02  # a CPU without VNNI has 64
        assert float((again - weight).norm() / weight.norm()) < bound
        assert torch.equal(state["layers.4.weight"], run.model.get_submodule("layers.4").weight)


def test_an_int8_model_is_exported_as_int8(text: Path, tmp_path: Path) -> None:
    more = [*TEXT, INT8, "optimization.quantization.max_drop=1", "evaluate.export=export"]
    int8 = evaluated(text, tmp_path, *more, "optimization.quantization.mode=weight_only").export
    floats = (text / "checkpoints" / "last" / "model.safetensors").stat().st_size
    assert int8["model"] == "int8" and int8["bytes"] < floats


def test_a_model_that_cannot_be_exported_is_one_clear_error_and_its_metrics_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    odd = ["model._target_=odd_models.Branching", "security.trusted=[odd_models]"]
    runs.trained(*odd, "training.steps=2", folder=tmp_path / "run")
    for kind, says in (("export", "does not take this model"), ("torchscript", "differ from")):
        to = tmp_path / kind
        with pytest.raises(ConfigError, match=rf"^evaluate\.export: .*{says}") as refused:
            evaluated(tmp_path / "run", to, *odd, f"evaluate.export={kind}")
        assert "\n" not in str(refused.value)
        kept = Summary.read(to)
        assert kept.status == "done"
        assert "evaluate.export" in kept.reason
        assert kept.metrics["val/loss"] > 0
        assert not list((to / "exports").iterdir())


def test_an_export_of_missing_int8_weights_writes_no_file(mlp: Path, tmp_path: Path) -> None:
    more = ["optimizer.ema=0.9", INT8, "optimization.quantization.min_features=999"]
    with pytest.raises(ConfigError, match=r"^evaluate\.export: there is no quantised model"):
        evaluated(mlp, tmp_path, *more, "evaluate.export=quantized")
    with pytest.raises(ConfigError, match=r"^optimization\.quantization: .*no linear layer"):
        evaluated(mlp, tmp_path / "strict", *more, "optimization=basic", "optimization.strict=true")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["evaluate.export=onnx"], "train first"),
        (["job=evaluate", "checkpoint.resume=x", "evaluate.export=quantized"], "needs a quantised"),
        (["job=evaluate", "checkpoint.resume=x", "evaluate.export=onxx"], "onxx"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_its_key(typed: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^evaluate\.export: .*{says}"):
        compose(typed)


def test_onnx_without_its_packages_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.datasets.export.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^evaluate\.export: .*pip install '.*\[onnx\]'"):
        evaluated(tmp_path / "nothing", tmp_path / "to", "evaluate.export=onnx")
    assert not (tmp_path / "to").exists()
