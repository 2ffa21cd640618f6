"""Exports a trained model, reads the file back, and compares its outputs with the model's."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.utils._pytree import tree_leaves, tree_map

from runner.checkpoint.snapshot import Copier, write_tensors
from runner.data.batch import Inputs, call, count, rows
from runner.data.preprocessing import NAME as PREPROCESSING
from runner.data.preprocessing import parse_preprocessing
from runner.errors import ConfigError, RunnerError, StorageError, install_command
from runner.jobs.config import ExportKind
from runner.jobs.pipeline import RawInputModel, has_pipeline, raw_inputs
from runner.record.storage import replace_text, write_file
from runner.record.text import shorten
from runner.training.evaluation import standalone
from runner.training.run import Run

log = logging.getLogger("runner")

KEY = "evaluate.export"
FILES = {
    ExportKind.torchscript: "model.ts",
    ExportKind.export: "model.pt2",
    ExportKind.onnx: "model.onnx",
    ExportKind.weights: "model.safetensors",
    ExportKind.quantized: "model.safetensors",
}
PIPELINES = (ExportKind.export, ExportKind.onnx)
ONNX = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # of the largest output
INT8_TOLERANCE = 5e-2  # a last bit may tip a value over to the next level

Written = Callable[[Inputs], Any]  # the written model, read back


def check(kind: ExportKind) -> None:
    """Raise ConfigError if a package is missing, before any work."""
    missing = [name for name in ONNX if find_spec(name) is None]
    if kind is ExportKind.onnx and missing:
        problem = f"onnx needs {', '.join(missing)}, not installed"
        raise ConfigError(KEY, problem, install_command("onnx"))


def export(
    run: Run, kind: ExportKind, folder: Path, tokenizer: str | None = None
) -> dict[str, Any]:
    """Write the evaluated model to `folder`; returns its file, bytes and largest difference.

    Traced on the CPU in the weights' precision, for any batch size. With the folder of a
    `tokenizer`, weights become a folder for `from_pretrained` of transformers. Raises ConfigError
    for a model that the format does not support, and StorageError.
    """
    path = folder / FILES[kind]
    folder.mkdir(parents=True, exist_ok=True)
    entry: dict[str, Any] = {"file": f"{folder.name}/{path.name}"}
    entry["model"] = "float" if run.quantized is None else "int8"
    stored = run.checkpointer.preprocessing
    preprocessing = parse_preprocessing(stored, path) if stored else None
    try:
        if kind is ExportKind.quantized:
            _write_quantized(run, path)
        elif kind is ExportKind.weights:
            entry["model"] = "float"
            _write_tensors(path, standalone(run).state_dict())
            if tokenizer is not None:
                from runner.models.hugging_face import save_beside

                save_beside(run.model, Path(tokenizer), folder)
        else:
            model = (standalone(run) if run.quantized is None else run.quantized.model).cpu()
            inputs, samples = _example(run)
            entry["largest_difference"] = _write_traced(run, model, inputs, samples, kind, path)
            if kind in PIPELINES and preprocessing is not None and has_pipeline(preprocessing):
                program = RawInputModel(model, preprocessing).eval()
                raw, pipeline = raw_inputs(preprocessing, inputs), path.with_stem("pipeline")
                _write_traced(run, program, raw, samples, kind, pipeline)
                entry["pipeline"] = f"{folder.name}/{pipeline.name}"
                _write_example(folder)
        if stored:
            (folder / PREPROCESSING).write_bytes(stored)  # as it is: it is read back
        entry["bytes"] = os.path.getsize(path)
    except OSError as error:
        raise StorageError(f"{path}: not written: {error.strerror or error}") from error
    entry["files"] = sorted(file.name for file in folder.iterdir() if file.is_file())
    log.info("%s: %s bytes", entry["file"], f"{entry['bytes']:,}")
    return entry


def _write_quantized(run: Run, path: Path) -> None:
    """Write the int8 model's state dict. Raises ConfigError if there is none."""
    if run.quantized is None:
        evidence = run.evidence.get("quantization")
        reason = (evidence.reason if evidence else "") or "see techniques in summary.json"
        problem = f"there is no quantised model: {reason}"
        raise ConfigError(KEY, problem, "change optimization.quantization")
    state = run.quantized.model.state_dict()
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and type(tensor) is not Tensor:
            problem = f"{name} is a {type(tensor).__name__}, not a plain tensor"
            raise ConfigError(KEY, problem, "use optimization.quantization.mode=dynamic")
    _write_tensors(path, state)


def _write_tensors(path: Path, state: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    write_file(path, partial(write_tensors, Copier(reuse=False).take(state, {})))


def _write_example(folder: Path) -> None:
    from runner.jobs import pipeline_example

    text = Path(pipeline_example.__file__).read_text(encoding="utf-8")
    replace_text(folder / "pipeline_example.py", text)


def _example(run: Run) -> tuple[Inputs, int]:
    """Return the inputs of a validation batch on the CPU, and its number of samples."""
    try:
        batch, target = next(run.validation.batches(0))
    finally:
        run.validation.close()
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, batch), count(target)


def _write_traced(
    run: Run, model: nn.Module, inputs: Inputs, samples: int, kind: ExportKind, path: Path
) -> float:
    """Write a traced model; return the largest difference of the file's outputs from its own."""
    half = rows(inputs, slice(max(1, samples // 2)))  # shows that the batch size is free
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            again = WRITERS[kind](model, inputs, path)
            differences = [_difference(call(model, x), again(x)) for x in (inputs, half)]
    except (OSError, RunnerError):
        raise
    except Exception as error:  # tracers raise anything
        path.unlink(missing_ok=True)
        weight_only = "optimization.quantization.mode=weight_only, or " if run.quantized else ""
        raise ConfigError(
            KEY,
            f"{kind.name} does not take this model: {_root_cause(error)}",
            f"try {weight_only}another format; the metrics are in summary.json",
        ) from error
    largest = max(difference for difference, _ in differences)
    tolerance = TOLERANCE if run.quantized is None else INT8_TOLERANCE
    if any(not difference <= tolerance * scale for difference, scale in differences):
        path.unlink(missing_ok=True)
        raise ConfigError(
            KEY,
            f"the outputs of the {kind.name} file differ from the model's by {largest:.2g}",
            "its forward depends on the data or is random; try another format",
        )
    return largest


def _torchscript(model: nn.Module, inputs: Inputs, path: Path) -> Written:
    example: Any = {"example_kwarg_inputs": inputs}
    if not isinstance(inputs, dict):
        several = isinstance(inputs, tuple | list)
        example = {"example_inputs": tuple(inputs) if several else (inputs,)}
    with warnings.catch_warnings():
        # torch 2.13 on itself; and a trace's warnings, whose cases the comparison covers
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        traced = torch.jit.trace(model, **example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        traced.save(str(path))
        loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # our own file
    return partial(call, loaded)


def _export(model: nn.Module, inputs: Inputs, path: Path) -> Written:
    torch.export.save(_exported(model, inputs), path)
    return partial(call, torch.export.load(path).module())  # our own file


def _exported(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    by_name = dict(inputs) if isinstance(inputs, dict) else {}
    several = isinstance(inputs, tuple | list)
    by_place = () if by_name else tuple(inputs) if several else (inputs,)
    batch_size = {0: torch.export.Dim.DYNAMIC}
    shapes: Any = tree_map(
        lambda x: batch_size if isinstance(x, Tensor) else None, by_name or by_place
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        return torch.export.export(model, by_place, by_name, dynamic_shapes=shapes)


def _onnx(model: nn.Module, inputs: Inputs, path: Path) -> Written:
    import onnxruntime

    chatter = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = chatter.level
    try:
        chatter.setLevel(logging.ERROR)  # about torchvision, which is not needed
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
        arrays = (tensor.numpy() for tensor in _tensors(inputs))
        return [
            torch.from_numpy(x) for x in session.run(None, dict(zip(names, arrays, strict=True)))
        ]

    return run


WRITERS = {
    ExportKind.torchscript: _torchscript,
    ExportKind.export: _export,
    ExportKind.onnx: _onnx,
}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _difference(expected: Any, actual: Any) -> tuple[float, float]:
    """Return the largest difference of two outputs, and the largest absolute value expected."""
    ours, theirs = _tensors(expected), _tensors(actual)
    if [x.shape for x in ours] != [x.shape for x in theirs] or not ours:
        raise ValueError(
            f"outputs of shape {[tuple(x.shape) for x in theirs]}, "
            f"where the model's are {[tuple(x.shape) for x in ours]}"
        )
    pairs = zip(ours, theirs, strict=True)
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return largest, max(1e-6, *(float(x.double().abs().max()) for x in ours))


def _root_cause(error: BaseException) -> str:
    """Return the first line of the first error in the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {shorten(lines[0], 200) if lines else ''}"
