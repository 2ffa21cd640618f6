"""Export a trained model, read the file back, and compare its outputs with the model's."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.utils._pytree import tree_leaves, tree_map

from runner.core.checkpoint.snapshot import Copier, write_tensors
from runner.core.data.preprocessing import NAME as PREPROCESSING
from runner.core.data.preprocessing import Preprocessing, parse_preprocessing
from runner.core.data.target_scale import in_target_unit
from runner.core.errors import ConfigError, RunnerError, StorageError, install_command
from runner.core.execution.evaluation import copy_standalone_model
from runner.core.interfaces.batch import Column, Inputs, batch_size_of, call_model, slice_rows
from runner.core.interfaces.run import Run
from runner.core.objectives.model_output import class_logits, logits
from runner.core.record.library_files import private_folder
from runner.core.record.storage import HashedFile, replace_text, write_file
from runner.core.record.text import shorten
from runner.core.schemas.jobs import ExportKind
from runner.datasets.cells import MISSING_FLAG

log = logging.getLogger("runner")

EXPORT_KEY = "evaluate.export"
EXPORT_FILES = {
    ExportKind.torchscript: "model.ts",
    ExportKind.export: "model.pt2",
    ExportKind.onnx: "model.onnx",
    ExportKind.weights: "model.safetensors",
    ExportKind.quantized: "model.safetensors",
}
PIPELINE_KINDS = (ExportKind.export, ExportKind.onnx)
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3  # relative to the largest output
INT8_TOLERANCE = 5e-2  # rounding may move a value to the next quantization level

Entry = dict[str, Any]  # of an export in the summary
ReloadedModel = Callable[[Inputs], Any]  # the exported model, loaded again


def check_export_packages(kind: ExportKind) -> None:
    """Raise ConfigError if a required package is missing."""
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if kind is ExportKind.onnx and missing:
        problem = f"onnx needs {', '.join(missing)}, not installed"
        raise ConfigError(EXPORT_KEY, problem, install_command("onnx"))


def export(run: Run, kind: ExportKind, folder: Path, tokenizer: str | None = None) -> Entry:
    """Export the evaluated model to `folder`; returns file names, bytes and largest difference.

    Traced on the CPU in the weights' precision, with a dynamic batch size. With a `tokenizer`
    folder, weights are exported as a folder for transformers' `from_pretrained`. Raises ConfigError
    if the format does not support the model, and StorageError.
    """
    entry: Entry = {"file": f"{folder.name}/{EXPORT_FILES[kind]}"}
    entry["model"] = "float" if run.quantized is None else "int8"
    try:
        with private_folder(folder) as private:  # moved from there if the export succeeds
            _write_export(run, kind, private / EXPORT_FILES[kind], tokenizer, entry)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{folder / EXPORT_FILES[kind]}: not written: {reason}") from error
    entry["files"] = sorted(file.name for file in folder.iterdir() if file.is_file())
    log.info("%s: %s bytes", entry["file"], f"{entry['bytes']:,}")
    return entry


def _write_export(
    run: Run, kind: ExportKind, path: Path, tokenizer: str | None, entry: Entry
) -> None:
    preprocessing_json = run.checkpointer.preprocessing
    preprocessing = parse_preprocessing(preprocessing_json, path) if preprocessing_json else None
    if kind is ExportKind.quantized:
        _write_quantized(run, path)
    elif kind is ExportKind.weights:
        entry["model"] = "float"
        _write_tensors(path, copy_standalone_model(run).state_dict())
        if tokenizer is not None:
            from runner.datasets.hugging_face_model import save_pretrained_files

            save_pretrained_files(run.model, Path(tokenizer), path.parent)
    else:
        model = (copy_standalone_model(run) if run.quantized is None else run.quantized.model).cpu()
        inputs, samples = _example_batch(run)
        entry["largest_difference"] = _write_traced(run, model, inputs, samples, kind, path)
        if kind in PIPELINE_KINDS and preprocessing is not None and has_pipeline(preprocessing):
            program = RawInputModel(model, preprocessing).eval()
            raw, pipeline = raw_inputs(preprocessing, inputs), path.with_stem("pipeline")
            _write_traced(run, program, raw, samples, kind, pipeline)
            entry["pipeline"] = f"{Path(entry['file']).parent}/{pipeline.name}"
            if kind is ExportKind.export and preprocessing.columns:
                example = Path(__file__).with_name("pipeline_example.py").read_text("utf-8")
                replace_text(path.with_name("pipeline_example.py"), example)
    if preprocessing_json:  # unchanged, since it is read back
        write_file(path.with_name(PREPROCESSING), partial(_write_bytes, preprocessing_json))
    entry["bytes"] = os.path.getsize(path)


def _write_bytes(data: bytes, file: HashedFile) -> None:
    file.write(data)


def _write_quantized(run: Run, path: Path) -> None:
    if run.quantized is None:
        evidence = run.evidence.get("quantization")
        reason = (evidence.reason if evidence else "") or "see techniques in summary.json"
        problem = f"there is no quantised model: {reason}"
        raise ConfigError(EXPORT_KEY, problem, "change optimization.quantization")
    state = run.quantized.model.state_dict()
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and type(tensor) is not Tensor:
            problem = f"{name} is a {type(tensor).__name__}, not a plain tensor"
            raise ConfigError(EXPORT_KEY, problem, "use optimization.quantization.mode=dynamic")
    _write_tensors(path, state)


def _write_tensors(path: Path, state: dict[str, Any]) -> None:
    snapshot = Copier(reuse=False).take(state, {})
    if missing := [f"{n} ({x.dtype})" for n, x in snapshot.extra.items() if isinstance(x, Tensor)]:
        problem = f"safetensors does not hold {', '.join(missing)}"
        raise ConfigError(EXPORT_KEY, problem, "use evaluate.export=export")
    write_file(path, partial(write_tensors, snapshot))


def _example_batch(run: Run) -> tuple[Inputs, int]:
    """Return the inputs of a validation batch, and its number of samples."""
    try:
        batch, target = next(run.validation.batches(0))
    finally:
        run.validation.close()
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, batch), batch_size_of(target)


def _write_traced(
    run: Run, model: nn.Module, inputs: Inputs, samples: int, kind: ExportKind, path: Path
) -> float:
    """Export and reload; return the largest difference from the model's outputs."""
    half = slice_rows(inputs, slice(max(1, samples // 2)))  # checks that the batch size is dynamic
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            reloaded = WRITERS[kind](model, inputs, path)
            batches = inputs, half
            differences = [_difference(call_model(model, x), reloaded(x)) for x in batches]
    except (OSError, RunnerError):
        raise
    except Exception as error:  # tracers raise any type
        weight_only = "optimization.quantization.mode=weight_only, or " if run.quantized else ""
        problem = f"{kind.name} does not take this model: {_root_cause(error)}"
        fix = f"try {weight_only}another format; the metrics are in summary.json"
        raise ConfigError(EXPORT_KEY, problem, fix) from error
    largest = max(difference for difference, _ in differences)
    tolerance = TOLERANCE if run.quantized is None else INT8_TOLERANCE
    if any(not difference <= tolerance * scale for difference, scale in differences):
        problem = f"the outputs of the {kind.name} file differ from the model's by {largest:.2g}"
        fix = "its forward depends on the data or is random; try another format"
        raise ConfigError(EXPORT_KEY, problem, fix)
    return largest


def _export_torchscript(model: nn.Module, inputs: Inputs, path: Path) -> ReloadedModel:
    example: Any = {"example_kwarg_inputs": inputs}
    if not isinstance(inputs, dict):
        is_sequence = isinstance(inputs, tuple | list)
        example = {"example_inputs": tuple(inputs) if is_sequence else (inputs,)}
    with warnings.catch_warnings():
        # torch 2.13's own deprecations, and tracer warnings, which the comparison covers
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        traced = torch.jit.trace(model, **example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
        traced.save(str(path))
        loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # our own file
    return partial(call_model, loaded)


def _export_program(model: nn.Module, inputs: Inputs, path: Path) -> ReloadedModel:
    torch.export.save(_trace_program(model, inputs), path)
    return partial(call_model, torch.export.load(path).module())  # our own file


def _trace_program(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    kwargs = dict(inputs) if isinstance(inputs, dict) else {}
    is_sequence = isinstance(inputs, tuple | list)
    args = () if kwargs else tuple(inputs) if is_sequence else (inputs,)
    batch_size = {0: torch.export.Dim.DYNAMIC}
    shapes: Any = tree_map(lambda x: batch_size if isinstance(x, Tensor) else None, kwargs or args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)


def _export_onnx(model: nn.Module, inputs: Inputs, path: Path) -> ReloadedModel:
    import onnxruntime

    onnx_logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = onnx_logger.level
    try:
        onnx_logger.setLevel(logging.ERROR)  # about missing torchvision, which is not needed
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            program = torch.onnx.export(_trace_program(model, inputs), dynamo=True, verbose=False)
    finally:
        onnx_logger.setLevel(level)
    if program is None:
        raise RuntimeError("torch.onnx.export made no program")
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(inputs: Inputs) -> list[Tensor]:
        arrays = (tensor.numpy() for tensor in _tensor_leaves(inputs))
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.from_numpy(output) for output in outputs]

    return run


WRITERS = {
    ExportKind.torchscript: _export_torchscript,
    ExportKind.export: _export_program,
    ExportKind.onnx: _export_onnx,
}


def _tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _difference(expected: Any, actual: Any) -> tuple[float, float]:
    """Return the largest difference between two outputs, and the largest value of the first."""
    expected_tensors, actual_tensors = _tensor_leaves(expected), _tensor_leaves(actual)
    expected_shapes = [tuple(x.shape) for x in expected_tensors]
    shapes = [tuple(x.shape) for x in actual_tensors]
    if expected_shapes != shapes or not expected_tensors:
        raise ValueError(f"outputs of shape {shapes}, where the model's are {expected_shapes}")
    pairs = zip(expected_tensors, actual_tensors, strict=True)
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return largest, max(1e-6, *(float(x.double().abs().max()) for x in expected_tensors))


def _root_cause(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {shorten(lines[0], 200) if lines else ''}"


# -- a model with its preprocessing as one module --------------------------------------------------


class RawInputModel(nn.Module):
    """Returns class probabilities, or values in the target's unit, from raw inputs.

    Tables: unscaled numbers, float64 [batch, columns], NaN where missing, and category indices,
    int64 [batch, columns], any invalid index for an unknown category. Images: uint8 [batch,
    channels, height, width].
    """

    means: Tensor
    deviations: Tensor
    fills: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model, self.sizes = model, preprocessing.sizes
        self.columns, self.pixel_range = preprocessing.columns, preprocessing.pixel_range
        numbers = number_columns(self.columns)
        fills = [c.mean if c.fill is None else c.fill for c in numbers]
        for name, values in (
            ("means", [c.mean for c in numbers]),
            ("deviations", [c.deviation for c in numbers]),
            ("fills", fills),
        ):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, raw: Tensor, categories: Tensor | None = None) -> Tensor:
        """Return the predictions, float32 [batch, classes] or [batch, values]."""
        inputs = self._images(raw) if categories is None else self._inputs(raw, categories)
        output = logits(call_model(self.model, inputs)).double()
        if self.sizes.task == "classification":
            return class_logits(output, self.sizes.classes).softmax(1).float()
        values: Tensor = in_target_unit(self.sizes, output)
        # len() would make the batch size static
        return values.reshape(values.shape[0], -1).float()

    def _images(self, raw: Tensor) -> Tensor:
        """Scale the pixels by their own depth: uint8 by 255, others by the trained range."""
        if not self.pixel_range or raw.dtype is torch.uint8:
            return raw.float() / 255
        low, high = self.pixel_range
        return (raw.float() - low) / ((high - low) or 1.0)

    def _inputs(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Encode a table's columns as in training."""
        missing = numbers.isnan()
        scaled = torch.where(missing, self.fills, numbers.double())
        scaled = (scaled - self.means) / self.deviations
        numeric_columns = number_columns(self.columns)
        indices = {column.name: index for index, column in enumerate(numeric_columns)}
        parts, category = [], 0
        for column in self.columns:
            if column.values:
                known = torch.arange(len(column.values))
                one_hot = categories[:, category : category + 1] == known
                parts += [one_hot, ~one_hot.any(1, keepdim=True)]
                category += 1
            elif column.part == MISSING_FLAG:
                parts.append(missing[:, indices[column.name]].unsqueeze(1))
            else:
                parts.append(scaled[:, numeric_columns.index(column)].unsqueeze(1))
        return torch.cat([part.float() for part in parts], 1)


def number_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns for which the pipeline takes a number.

    A missing-value indicator is one only if its number is not an input itself.
    """
    names = {column.name for column in columns if column.part != MISSING_FLAG}
    return [c for c in columns if not c.values and (c.part != MISSING_FLAG or c.name not in names)]


def has_pipeline(preprocessing: Preprocessing) -> bool:
    """Whether raw inputs have a standard form: tables and images."""
    return bool(preprocessing.columns) or preprocessing.kind == "images"


def raw_inputs(preprocessing: Preprocessing, inputs: Tensor) -> tuple[Tensor, ...]:
    """Invert the preprocessing approximately; missing values become NaN."""
    columns = preprocessing.columns
    if preprocessing.pixel_range:
        low, high = preprocessing.pixel_range
        return (inputs * ((high - low) or 1.0) + low,)
    if not columns:
        return ((inputs * 255).round().to(torch.uint8),)
    blocks = torch.split(inputs.double(), [c.width for c in columns], 1)
    cells = dict(zip(columns, blocks, strict=True))
    categories = [cells[column].argmax(1) for column in columns if column.values]
    missing_masks = {c.name: cells[c][:, 0] > 0 for c in columns if c.part == MISSING_FLAG}
    numbers = [
        (cells[column][:, 0] * column.deviation + column.mean).masked_fill(
            missing_masks.get(column.name, torch.tensor(False)), torch.nan
        )
        for column in number_columns(columns)
    ]
    count = len(inputs)
    return (
        torch.stack(numbers, 1) if numbers else torch.zeros(count, 0, dtype=torch.float64),
        torch.stack(categories, 1) if categories else torch.zeros(count, 0, dtype=torch.int64),
    )
