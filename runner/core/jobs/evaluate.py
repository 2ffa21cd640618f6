"""job=evaluate: compute a saved model's validation metrics, and export the model."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from runner import rooms
from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.checks.model import ModelCheck
from runner.core.checks.outputs import Changes, describe_changes, sanitise
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset
from runner.core.data.target_scale import in_target_unit
from runner.core.errors import ConfigError, RunnerError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.hook import Evaluation
from runner.core.interfaces.nested import tensors
from runner.core.interfaces.run import Run
from runner.core.jobs import run_report as report
from runner.core.record.summary import Summary
from runner.core.schemas.checks import OutputsConfig
from runner.core.schemas.debug import DebugConfig
from runner.core.schemas.jobs import ExportKind
from runner.core.schemas.models import HuggingFaceConfig
from runner.core.schemas.optimization import Quantization
from runner.core.train.evidence import build_summary, collect_evidence, technique_statuses


def main(config: RunConfig, folder: Path) -> Summary:
    """Evaluate the weights of `checkpoint.resume` or `model.weights`, also in int8 if requested.

    The summary is written before the export, so that a failed export does not lose it.
    """
    kind = config.evaluate.export
    if kind is not ExportKind.none:
        typed = f"evaluate.export={kind.value}"
        rooms.find("export", "check", typed)(kind)
    with build_trained(config, folder) as run:
        run.recorder.open(run.progress.step)
        run.progress.metrics = _evaluate(run, config.checks.outputs).metrics
        run.progress.validated_step = run.progress.step
        for hook in run.hooks:
            if isinstance(hook, ModelCheck):  # other hooks concern training
                hook.check(run, after_training=True)
        _quantize(run)
        metrics = {name.removeprefix("val/"): x for name, x in run.progress.metrics.items()}
        run.recorder.scalars(run.progress.step, "val", metrics)
        # the best value of the training may be of another model or data
        run.progress.best = run.progress.metrics.get(run.monitor)
        run.progress.best_step = run.progress.step
        summary = build_summary(run, "done", job="evaluate")
        report.write_report(summary, folder)
        if kind is ExportKind.none:
            return summary
        try:
            tokenizer = None
            if isinstance(config.model, HuggingFaceConfig):
                tokenizer = getattr(config.data, "tokenizer", None) or config.model.path
            export = rooms.find("export", "write", typed)
            summary.export = export(run, kind, folder / "exports", tokenizer)
        except RunnerError as error:
            summary.reason = str(error)
            raise
        finally:
            summary.write(folder)
            report.write_report(summary, folder)
    return summary


def build_trained(config: RunConfig, folder: Path | None, data: Dataset | None = None) -> Run:
    """Build the run as it was trained, without debug tools."""
    config = copy(config)
    config.debug = DebugConfig(hooks=config.debug.hooks)  # tools inspect training steps
    config.data = replace(config.data, drop_last=False)
    components = Components(data=data)
    if config.optimization.level == "auto":  # the selection recorded in training, if any
        resolve_auto = rooms.find("auto", "resolve", "optimization=auto")
        components = replace(resolve_auto(config, search=False), data=data)
    return build(config, folder, components)


def _evaluate(run: Run, limits: OutputsConfig) -> Evaluation:
    """Evaluate on the raw outputs, whose metrics stay; what `sanitise` would change is a fault."""
    if not limits.enabled:
        return evaluate(run)

    forward, changes = run.forward, Changes()

    def watched_forward(*inputs: Any, **keywords: Any) -> Any:
        nonlocal changes
        output = forward(*inputs, **keywords)
        if run.sizes.task == "regression" and isinstance(output, Tensor):
            values = in_target_unit(run.sizes, output)
            _, own = sanitise(values, nan=limits.nan, low=limits.low, high=limits.high)
            changes += own
        elif tensors(output):
            changes += sanitise(output)[1]
        return output

    run.forward = watched_forward
    try:
        evaluation = evaluate(run)
    finally:
        run.forward = forward
    changed = describe_changes(changes.read())  # the only host sync for this
    if changed:
        run.history.add(
            "outputs", f"outputs on the validation set: {changed}", step=run.progress.step,
            category="numerics", action="metrics are of the outputs as they are",
        )  # fmt: skip
    return evaluation


def _quantize(run: Run) -> None:
    """Replace the float model's metrics by the int8 model's, if quantization was accepted."""
    # other techniques concern training
    run.techniques[:] = [(n, t) for n, t in run.techniques if isinstance(t, Quantization)]
    collect_evidence(run)
    if run.quantized is not None:
        run.progress.metrics = run.quantized.evaluation.metrics
    for row in technique_statuses(run):
        if run.strict and row.requested and not row.engaged:
            fix = "switch it off or set optimization.strict=false"
            raise ConfigError(f"optimization.{row.name}", f"did not engage: {row.reason}", fix)
