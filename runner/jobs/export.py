"""A trained model in a file of another format: written, read back, and held against the model."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from runner.checkpoint.snapshot import Copier, write_tensors
from runner.data.batch import Inputs, call, count, rows
from runner.errors import ConfigError, RunnerError, StorageError
from runner.jobs.config import ExportKind
from runner.record.storage import write_file
from runner.record.text import shorten
from runner.training.evaluation import standalone
from runner.training.run import Run

log = logging.getLogger("runner")

KEY = "evaluate.export"
FILES = {
    ExportKind.torchscript: "model.ts",
    ExportKind.export: "model.pt2",
    ExportKind.onnx: "model.onnx",
    ExportKind.quantized: "model.safetensors",
}
NEEDED = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # of the largest output
OTHER_ORDER = 5e-2  # likewise, of int8 layers: a last bit may tip a value over to the next level


def check(kind: ExportKind) -> None:
    """Raises ConfigError where a package is missing, before anything is done."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if kind is ExportKind.onnx and missing:
        raise ConfigError(
            KEY, f"onnx needs {', '.join(missing)}, not installed", "pip install 'runner[onnx]'"
        )


def export(run: Run, kind: ExportKind, folder: Path) -> dict[str, Any]:
    """Write the evaluated model to `folder` and say which file, its size, and how far it is off.

    On the CPU and in the weights' own precision, with a batch of any size. Raises ConfigError for a
    model that the format does not take, and StorageError.
    """
    path = folder / FILES[kind]
    folder.mkdir(parents=True, exist_ok=True)
    difference = None
    try:
        if kind is ExportKind.quantized:
            _write_quantized(run, path)
        else:
            difference = _write_traced(run, kind, path)
    except OSError as error:
        raise StorageError(f"{path}: not written: {error.strerror or error}") from error
    found: dict[str, Any] = {
        "file": f"{folder.name}/{path.name}",
        "model": "float" if run.quantized is None else "int8",
        "bytes": os.path.getsize(path),
    }
    if difference is not None:
        found["largest_difference"] = difference
    told = "" if difference is None else f", largest difference {difference:.2g}"
    log.info("%s: %s bytes%s", found["file"], f"{found['bytes']:,}", told)
    return found


def _write_quantized(run: Run, path: Path) -> None:
    """The int8 model's state, in the names of its modules."""
    if run.quantized is None:
        reason = run.evidence["quantization"].reason if "quantization" in run.evidence else ""
        raise ConfigError(
            KEY, f"there is no quantised model: {reason or 'see techniques in summary.json'}",
            "change optimization.quantization",
        )  # fmt: skip
    state = run.quantized.model.state_dict()
    foreign = [n for n, t in state.items() if isinstance(t, Tensor) and type(t) is not Tensor]
    if foreign:
        raise ConfigError(
            KEY, f"{foreign[0]} is a {type(state[foreign[0]]).__name__}, which is no plain tensor",
            "use optimization.quantization.backend=torch",
        )  # fmt: skip
    path.unlink(missing_ok=True)
    write_file(path, partial(write_tensors, Copier(reuse=False).take(state, {})))


def _write_traced(run: Run, kind: ExportKind, path: Path) -> float:
    model = (standalone(run) if run.quantized is None else run.quantized.model).cpu()
    try:
        inputs, target = next(run.validation.batches(0))
        few = max(1, count(target) // 2)
    finally:
        run.validation.close()
    inputs = _on_cpu(inputs)
    write = {
        ExportKind.torchscript: _torchscript, ExportKind.export: _export, ExportKind.onnx: _onnx,
    }[kind]  # fmt: skip
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            again = write(model, inputs, path)
            parts = [inputs, rows(inputs, slice(few))]  # the second shows that the size is free
            differences = [_difference(call(model, x), again(x)) for x in parts]
    except (OSError, RunnerError):
        raise
    except Exception as error:  # tracers raise anything
        path.unlink(missing_ok=True)
        raise ConfigError(
            KEY, f"{kind.name} does not take this model: {_cause(error)}",
            f"try {_way_out(run)}; the metrics are in summary.json",
        ) from error  # fmt: skip
    largest = max(off for off, _ in differences)
    allowed = TOLERANCE if run.quantized is None else OTHER_ORDER
    if any(not off <= allowed * scale for off, scale in differences):
        path.unlink(missing_ok=True)
        raise ConfigError(
            KEY, f"what {kind.name} made of this model puts out something else, {largest:.2g} off",
            "its forward does something that depends on the data, or is random; try another format",
        )  # fmt: skip
    return largest


def _way_out(run: Run) -> str:
    """What may help: of the int8 layers, those with int8 weights alone go into every format."""
    other = "another format"
    return f"optimization.quantization.mode=weight_only, or {other}" if run.quantized else other


def _torchscript(model: nn.Module, inputs: Inputs, path: Path) -> Callable[[Inputs], Any]:
    named: Any = {"example_kwarg_inputs": inputs} if isinstance(inputs, dict) else {}
    if not named:
        named = {"example_inputs": tuple(inputs) if _is_several(inputs) else (inputs,)}
    with warnings.catch_warnings():
        # torch 2.13 on itself; and a trace's warnings, whose cases the comparison covers
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        traced = torch.jit.trace(model, **named, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        traced.save(str(path))
        loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # our own file
    return partial(call, loaded)


def _export(model: nn.Module, inputs: Inputs, path: Path) -> Callable[[Inputs], Any]:
    torch.export.save(_exported(model, inputs), path)
    return partial(call, torch.export.load(path).module())  # our own file


def _exported(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    by_name = dict(inputs) if isinstance(inputs, dict) else {}
    by_place = () if by_name else tuple(inputs) if _is_several(inputs) else (inputs,)
    shapes = _free(by_name or by_place)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        return torch.export.export(model, by_place, by_name, dynamic_shapes=shapes)


def _onnx(model: nn.Module, inputs: Inputs, path: Path) -> Callable[[Inputs], Any]:
    import onnxruntime

    chatter = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = chatter.level
    try:
        chatter.setLevel(logging.ERROR)  # torchvision, which nothing here needs, is not there
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            program = torch.onnx.export(_exported(model, inputs), dynamo=True, verbose=False)
    finally:
        chatter.setLevel(level)
    if program is None:
        raise RuntimeError("torch.onnx.export made no program")
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(inputs: Inputs) -> list[Tensor]:
        given = [x.numpy() for x in _tensors(inputs)]
        return [
            torch.from_numpy(x) for x in session.run(None, dict(zip(names, given, strict=True)))
        ]

    return run


def _is_several(inputs: Inputs) -> bool:
    return isinstance(inputs, tuple | list)


def _free(value: Any) -> Any:
    """The dimensions that may change, in the shape of the inputs: the first of each tensor."""
    if isinstance(value, Mapping):
        return {key: _free(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_free(item) for item in value)
    return {0: torch.export.Dim.DYNAMIC} if isinstance(value, Tensor) else None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_on_cpu(item) for item in value)
    return value.cpu() if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nest, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | tuple | list):
        return [tensor for item in items for tensor in _tensors(item)]
    return []


def _difference(one: Any, other: Any) -> tuple[float, float]:
    """The largest one between two outputs, and the size of the largest value in the first."""
    ours, theirs = _tensors(one), _tensors(other)
    if [x.shape for x in ours] != [x.shape for x in theirs] or not ours:
        raise ValueError(
            f"outputs of shape {[tuple(x.shape) for x in theirs]}, "
            f"where the model's are {[tuple(x.shape) for x in ours]}"
        )
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    off = max(float((a - b).abs().max()) for a, b in pairs)
    return off, max(1e-6, *(float(a.abs().max()) for a, _ in pairs))


def _cause(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {shorten(lines[0], 200) if lines else ''}"
