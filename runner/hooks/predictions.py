"""A few validation samples and what the model makes of them, to look at."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.checks.config import OutputsConfig
from runner.checks.outputs import Changes, described, sanitise
from runner.data.batch import Batch, call, rows
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
        """Write the samples and what the model, as it is now, says of them to the record.

        A model whose output is not the usual tensor for the task is passed over.
        """
        if self.batch is None:
            # kept: starting the loader's workers again each time would cost more than the pictures
            self.batch = rows(next(run.validation.batches(0)), slice(SHOWN))
        inputs, target = self.batch
        if run.sizes.task == "language_modelling":
            if isinstance(inputs, Tensor) and inputs.ndim == 2:
                with _at_rest(run):
                    text = _continuation(run, inputs[:1])
                if text is not None:
                    run.recorder.text("val/continuation", text, step)
            return
        with _at_rest(run):
            output = call(run.model, inputs)
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return
        output, target = output.float().cpu(), target.cpu()
        if run.sizes.task == "regression":
            said = output * run.sizes.target_deviation + run.sizes.target_mean
            said, note = self._clean(run, step, said, "quantities")
            run.recorder.text("val/predictions", _regression(said, target) + note, step)
        elif output.ndim == 2 and target.ndim == 1:
            shares, note = self._clean(run, step, output.softmax(1), "probabilities")
            self._classes(run, step, inputs, shares, target, note)

    def _clean(self, run: Run, step: int, values: Tensor, kind: str) -> tuple[Tensor, str]:
        """What is fit to be shown, and a line about what had to be changed for that."""
        limits = self.outputs
        if not limits.enabled:
            return values, ""
        clean, changes = (
            sanitise(values, kind)
            if kind == "probabilities"
            else sanitise(values, kind, nan=limits.nan, low=limits.low, high=limits.high)
        )
        return clean, self._note(run, step, changes)

    def _note(self, run: Run, step: int, changes: Changes) -> str:
        changed = described(changes.read())
        if not changed:
            return ""
        run.history.add(
            "outputs",
            f"predictions that are shown: {changed}",
            step=step,
            category="numerics",
            action="put in order for show",
        )
        return f"\n\nPut in order for show: {changed}."

    def _classes(
        self, run: Run, step: int, inputs: Any, shares: Tensor, target: Tensor, note: str
    ) -> None:
        sure, said = shares.max(1)
        true = [_name(run, int(i)) for i in target]
        predicted = [_name(run, int(i)) for i in said]
        images = _images(run, inputs)
        if images is not None:
            from runner.record.plots import image_grid

            run.recorder.image("val/predictions", image_grid(images.numpy(), true, predicted), step)
            return
        texts = _texts(run, inputs)
        rows = [
            (
                *([texts[i]] if texts else []),
                true[i],
                predicted[i],
                f"{sure[i]:.0%}",
                "" if true[i] == predicted[i] else "wrong",
            )
            for i in range(len(true))
        ]
        header = (*(["text"] if texts else []), "true", "predicted", "confidence", "")
        run.recorder.text("val/predictions", markdown.table(header, rows) + note, step)


@contextmanager
def _at_rest(run: Run) -> Iterator[None]:
    """The model as validation sees it; the run's random state and modes come back as they were.

    Compiled models run eagerly here: another batch size would be compiled anew, for seconds.
    """
    modes = [(module, module.training) for module in run.model.modules()]
    device = run.device.torch
    forked = [device] if device.type == "cuda" else []  # each step seeds the device again anyway
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=forked))
        stack.enter_context(torch.no_grad())
        if (
            "torch._dynamo" in sys.modules
        ):  # else nothing is compiled, and importing it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(run.update.averaged())
        for context in run.contexts:
            stack.enter_context(context())
        run.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _name(run: Run, index: int) -> str:
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
    """The beginning of each text, where token ids are bytes."""
    ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
    if ids is None or (run.sizes.vocab or 0) < 256 or (run.sizes.vocab or 0) > 260:
        return []
    return [_bytes(row)[:120] for row in ids.tolist()]


def _bytes(ids: Sequence[int]) -> str:
    """Text from byte ids; ids above 255 are marks, such as padding, and zero is no text."""
    return bytes(i for i in ids if 0 < i < 256).decode("utf-8", "replace")


def _regression(output: Tensor, target: Tensor) -> str:
    if output.numel() != target.numel():
        return "The model's outputs do not pair with the targets."
    pairs = zip(
        output.reshape(-1)[:SHOWN].tolist(), target.reshape(-1)[:SHOWN].tolist(), strict=True
    )
    rows = [(f"{true:.4g}", f"{said:.4g}", f"{said - true:+.3g}") for said, true in pairs]
    return markdown.table(("true", "predicted", "error"), rows)


def _continuation(run: Run, tokens: Tensor) -> str | None:
    """A prompt from the validation set and how the model goes on; None if it gives no logits.

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
    before, after = (_tokens(run, part) for part in (ids[:prompt], ids[prompt:]))
    return f"**prompt**\n\n{markdown.code(before)}\n\n**continued**\n\n{markdown.code(after)}"


def _tokens(run: Run, ids: list[int]) -> str:
    if run.sizes.vocab == 256:
        return bytes(ids).decode("utf-8", "replace")
    return " ".join(map(str, ids))
