"""A few validation samples and the model's predictions, as text in TensorBoard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.checks.config import OutputsConfig
from runner.checks.outputs import described, sanitise
from runner.data.batch import Batch, call, rows
from runner.record import markdown
from runner.training.evaluation import inference
from runner.training.run import Run

SHOWN = 12


class Predictions:
    """Always the same samples, so that TensorBoard's slider shows what is being learned."""

    def __init__(self, outputs: OutputsConfig | None = None) -> None:
        self.batch: Batch | None = None
        self.outputs = outputs or OutputsConfig()

    def show(self, run: Run, step: int) -> None:
        """Record the samples and the predictions of the model as it is now.

        A language model, and one whose output is not the usual tensor for the task, is passed over.
        """
        if run.sizes.task == "language_modelling":
            return
        if self.batch is None:
            # fetched once: starting the loader's workers again costs more than the predictions
            self.batch = rows(next(run.validation.batches(0)), slice(SHOWN))
        inputs, target = self.batch
        device = run.device.torch
        # the random state is put back; each step seeds the device again anyway
        with torch.random.fork_rng([device] if device.type == "cuda" else []), inference(run):
            output = call(run.model, inputs)
        if isinstance(output, Tensor) and isinstance(target, Tensor):
            text = self._table(run, step, inputs, output.float().cpu(), target.cpu())
            if text:
                run.recorder.text("val/predictions", text, step)

    def _table(self, run: Run, step: int, inputs: Any, output: Tensor, target: Tensor) -> str:
        if run.sizes.task == "regression" and output.numel() == target.numel():
            values = output * run.sizes.target_deviation + run.sizes.target_mean
            limits = {name: getattr(self.outputs, name) for name in ("nan", "low", "high")}
            values, note = self._clean(run, step, values, "quantities", **limits)
            return _regression(values, target) + note
        if output.ndim == 2 and target.ndim == 1:
            shares, note = self._clean(run, step, output.softmax(1), "probabilities")
            return _classes(run, inputs, shares, target) + note
        return ""

    def _clean(
        self, run: Run, step: int, values: Tensor, kind: str, **limits: Any
    ) -> tuple[Tensor, str]:
        """The values fit to be shown, and a line about what was changed for that."""
        if not self.outputs.enabled:
            return values, ""
        clean, changes = sanitise(values, kind, **limits)
        changed = described(changes.read())
        if not changed:
            return clean, ""
        run.history.add(
            "outputs",
            f"predictions that are shown: {changed}",
            step=step,
            category="numerics",
            action="put in order for show",
        )
        return clean, f"\n\nPut in order for show: {changed}."


def _classes(run: Run, inputs: Any, shares: Tensor, target: Tensor) -> str:
    """True and predicted class, the text first where the samples are texts."""
    names = run.sizes.class_names
    confidence, best = shares.max(1)
    true, predicted = (
        [names[i] if 0 <= i < len(names) else str(i) for i in classes.tolist()]
        for classes in (target, best)
    )
    texts = _texts(run, inputs)
    cells = [
        (*texts[i : i + 1], label, guess, f"{share:.0%}", "" if label == guess else "wrong")
        for i, (label, guess, share) in enumerate(zip(true, predicted, confidence, strict=True))
    ]
    return markdown.table((*["text"] * bool(texts), "true", "predicted", "confidence", ""), cells)


def _texts(run: Run, inputs: Any) -> list[str]:
    """The beginning of each text, where token ids are bytes; ids above 255 are marks."""
    ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
    if ids is None or not 256 <= (run.sizes.vocab or 0) <= 260:
        return []
    return [bytes(i for i in row if 0 < i < 256).decode("utf-8", "replace")[:120] for row in ids]


def _regression(output: Tensor, target: Tensor) -> str:
    pairs = zip(output.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True)
    cells = [(f"{true:.4g}", f"{value:.4g}", f"{value - true:+.3g}") for value, true in pairs]
    return markdown.table(("true", "predicted", "error"), cells[:SHOWN])
