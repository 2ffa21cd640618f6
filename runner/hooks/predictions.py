"""A few validation samples and the model's predictions, as text and pictures in TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.checks.config import OutputsConfig
from runner.checks.outputs import described, sanitise
from runner.data.batch import Batch, call, rows
from runner.models import modes
from runner.record import markdown
from runner.training.run import Run

SHOWN = 12
PROMPT, WRITTEN = 48, 96  # tokens; each one written is a forward pass of one sample


class Predictions:
    """Always the same samples, so that TensorBoard's slider shows what is being learned."""

    def __init__(self, outputs: OutputsConfig | None = None) -> None:
        self.batch: Batch | None = None
        self.outputs = outputs or OutputsConfig()

    def show(self, run: Run, step: int) -> None:
        """Record the samples and the predictions of the model as it is now.

        A model whose output is not the usual tensor for the task is passed over.
        """
        if self.batch is None:
            # fetched once: starting the loader's workers again costs more than the pictures
            self.batch = rows(next(run.validation.batches(0)), slice(SHOWN))
        inputs, target = self.batch
        if run.sizes.task == "language_modelling":
            if isinstance(inputs, Tensor) and inputs.ndim == 2:
                with _inference(run):
                    text = _continuation(run, inputs[:1])
                if text is not None:
                    run.recorder.text("val/continuation", text, step)
            return
        with _inference(run):
            output = call(run.model, inputs)
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return
        output, target = output.float().cpu(), target.cpu()
        if run.sizes.task == "regression" and output.numel() == target.numel():
            values = output * run.sizes.target_deviation + run.sizes.target_mean
            limits = {name: getattr(self.outputs, name) for name in ("nan", "low", "high")}
            values, note = self._clean(run, step, values, "quantities", **limits)
            run.recorder.text("val/predictions", _regression(values, target) + note, step)
        elif output.ndim == 2 and target.ndim == 1:
            shares, note = self._clean(run, step, output.softmax(1), "probabilities")
            _classes(run, step, inputs, shares, target, note)

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


def _classes(run: Run, step: int, inputs: Any, shares: Tensor, target: Tensor, note: str) -> None:
    confidence, best = shares.max(1)
    true = [_class_name(run, int(i)) for i in target]
    predicted = [_class_name(run, int(i)) for i in best]
    images = _images(run, inputs)
    if images is not None:
        from runner.record.plots import image_grid

        run.recorder.image("val/predictions", image_grid(images.numpy(), true, predicted), step)
        return
    texts = _texts(run, inputs)
    table = [
        (*texts[i : i + 1], label, guess, f"{share:.0%}", "" if label == guess else "wrong")
        for i, (label, guess, share) in enumerate(zip(true, predicted, confidence, strict=True))
    ]
    header = (*(["text"] if texts else []), "true", "predicted", "confidence", "")
    run.recorder.text("val/predictions", markdown.table(header, table) + note, step)


@contextmanager
def _inference(run: Run) -> Iterator[None]:
    """The model as validation sees it; the run's random state and modes are restored.

    Compiled models run eagerly here: compiling for another batch size takes seconds.
    """
    device = run.device.torch
    with ExitStack() as stack:
        # each step seeds the device again anyway
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # importing it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(run.update.averaged())
        for context in run.contexts:
            stack.enter_context(context())
        stack.enter_context(modes.evaluation_mode(run.model))
        yield


def _class_name(run: Run, index: int) -> str:
    names = run.sizes.class_names
    return names[index] if 0 <= index < len(names) else str(index)


def _images(run: Run, inputs: Any) -> Tensor | None:
    """Inputs as [N, C, H, W] on the host, if they are pictures."""
    side, channels = run.sizes.image_size, run.sizes.in_channels
    if side is None or channels not in (1, 3) or not isinstance(inputs, Tensor):
        return None
    if inputs[0].numel() != channels * side * side:
        return None
    return inputs.float().cpu().reshape(-1, channels, side, side)


def _texts(run: Run, inputs: Any) -> list[str]:
    """The beginning of each text, where token ids are bytes; ids above 255 are marks."""
    ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
    if ids is None or not 256 <= (run.sizes.vocab or 0) <= 260:
        return []
    return [bytes(i for i in row if 0 < i < 256).decode("utf-8", "replace")[:120] for row in ids]


def _regression(output: Tensor, target: Tensor) -> str:
    pairs = zip(output.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True)
    table = [(f"{true:.4g}", f"{said:.4g}", f"{said - true:+.3g}") for said, true in pairs]
    return markdown.table(("true", "predicted", "error"), table[:SHOWN])


def _continuation(run: Run, tokens: Tensor) -> str | None:
    """A prompt from the validation set and the model's continuation; None without logits.

    Drawn at temperature 0.8 from a generator of its own: greedy text repeats itself.
    """
    sequence = tokens.shape[1]
    tokens = tokens[:, : min(PROMPT, max(1, sequence // 2))]
    prompt = tokens.shape[1]
    generator = torch.Generator().manual_seed(0)
    for _ in range(WRITTEN):
        logits = call(run.model, tokens[:, -sequence:])
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            return None
        shares = (logits[0, -1].float().cpu() / 0.8).softmax(0)  # waits for the device
        if not torch.isfinite(shares).all():
            return None
        drawn = torch.multinomial(shares, 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens).view(1, 1)], 1)
    ids = tokens[0].tolist()
    before, after = (markdown.code(_decode(run, part)) for part in (ids[:prompt], ids[prompt:]))
    return f"**prompt**\n\n{before}\n\n**continued**\n\n{after}"


def _decode(run: Run, ids: Sequence[int]) -> str:
    if run.sizes.vocab == 256:
        return bytes(ids).decode("utf-8", "replace")
    return " ".join(map(str, ids))
