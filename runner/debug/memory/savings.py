"""Ways to make a step smaller, and how many bytes each would save, by tracing it so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.debug.memory.account import Account, size, table
from runner.debug.memory.prediction import of_run
from runner.device import resources
from runner.nest import tensors
from runner.predict import Prediction
from runner.record import markdown
from runner.run import Run
from runner.techniques.blocks import repeated_blocks

log = logging.getLogger("runner")

MIB = 2**20
LITTLE = 0.005  # share of the peak, below which a saving is not worth a row
CHUNK = {"cpu": 256}  # tokens of a chunk of the loss, elsewhere 2,048: as `chunked_loss` has it
COPIES = 3  # of whole logits at a time: they, their log-softmax and their gradient


@dataclass(frozen=True)
class Saving:
    """One way, and what it would save of a step's peak."""

    key: str  # as it is typed
    bytes: int
    price: str


def ways(run: Run, now: Prediction) -> list[Saving]:
    """What this run does not do yet, the most bytes first; each is traced, or counted by its sizes.

    Savings of two ways do not add up: each is of the run as it is.
    """
    found = [
        *_smaller_parts(run, now), *_recompute(run, now), *_lower_precision(run, now),
        *_chunked_loss(run), *_optimizer(run, now), *_copies(run, now),
    ]  # fmt: skip
    worth = [way for way in found if way.bytes >= LITTLE * now.peak]
    return sorted(worth, key=lambda way: -way.bytes)


def _smaller_parts(run: Run, now: Prediction) -> Iterator[Saving]:
    price = "more, smaller products; the same gradient, BatchNorm apart"
    for part in (2, 4, 8):
        samples = now.samples // part
        then = _try(partial(of_run, run, samples)) if samples else None
        if then is not None:
            yield Saving(f"training.micro_batch={samples}", now.peak - then.peak, price)
    full = run.train.samples(0)
    if now.samples == 1 and full > 1:
        batch = sum(size(t) for t in tensors(list(run.train.peek())))
        yield Saving(f"training.batch_size={full // 2}", batch // 2, "another gradient, noisier")


def _recompute(run: Run, now: Prediction) -> Iterator[Saving]:
    blocks = repeated_blocks(run.model)
    if run.recompute is not None or not blocks:
        return
    with _forgetting(blocks):
        then = _try(partial(of_run, run, now.samples))
    if then is not None:
        key = "optimization.recompute.enabled=true optimization.recompute.what=full"
        price = "a forward more of work: a step takes about a third longer; the same numbers"
        yield Saving(key, now.peak - then.peak, price)


def _lower_precision(run: Run, now: Prediction) -> Iterator[Saving]:
    kind, can = run.device.kind, run.device.capabilities
    if any(name == "amp" for name, _ in run.techniques) or not can.bf16:
        return
    cast = partial(torch.autocast, kind, torch.bfloat16)
    then = _try(partial(of_run, run, now.samples, [cast]))
    if then is not None:
        fast = "faster here" if can.bf16_fast else "slower here, where bf16 is emulated"
        price = f"products in bf16, {fast}"
        key = "optimization.amp.enabled=true optimization.amp.dtype=bf16"
        yield Saving(key, now.peak - then.peak, price)


def _chunked_loss(run: Run) -> Iterator[Saving]:
    vocab, sequence = run.sizes.vocab, run.sizes.sequence
    on = any(name == "chunked_loss" for name, _ in run.techniques)
    if on or not vocab or not sequence or not run.objective.takes_deferred:
        return
    tokens = run.micro_batch * sequence
    left = tokens - min(tokens, CHUNK.get(run.device.kind, 2048))
    yield Saving(
        "optimization.chunked_loss.enabled=true", left * vocab * 4 * COPIES,
        "the same numbers, eager it is faster too",
    )  # fmt: skip


def _optimizer(run: Run, now: Prediction) -> Iterator[Saving]:
    weights = sum(size(p) for p in run.update.parameters)
    average = sum(size(t) for t in run.update.average)
    state = now.optimizer - average
    if state > 1.5 * weights:
        price = "one number a weight in place of two; another optimizer, its rate is to be found"
        yield Saving("optimizer=sgd", state - weights, price)
    if average:
        yield Saving("optimizer.ema=null", average, "no averaged weights to evaluate")


def _copies(run: Run, now: Prediction) -> Iterator[Saving]:
    if run.device.kind == "cpu" and run.folder is not None:
        price = "no checkpoint is copied, so none is there to resume from or roll back to"
        yield Saving("checkpoint.enabled=false", now.copies, price)


def report(run: Run, reason: str, account: Account | None = None) -> str:
    """The page a person reads, in markdown."""
    now = of_run(run, min(run.micro_batch, run.train.samples(0)))
    parts = [
        ("weights and buffers", now.parameters), ("gradients", now.gradients),
        ("state of the optimizer, average", now.optimizer),
        ("copies for checkpoints and skipped steps", now.copies),
        ("activations, batch and temporaries", now.activations),
        ("  of these, kept for the backward", now.saved),
        ("all, at the peak", now.peak),
    ]  # fmt: skip
    room = resources.room()
    rows = [
        (f"{way.bytes / MIB:,.1f}", f"{way.bytes / now.peak:.0%}", way.key, way.price)
        for way in ways(run, now)
    ]
    lines = [
        "# Out of memory", "", markdown.escape(reason), "",
        f"A step with {now.samples} samples at a time, predicted by tracing it without its data:",
        "", markdown.table(("what", "MiB"), [(n, f"{b / MIB:,.1f}") for n, b in parts]), "",
        f"There are {room.limit / MIB:,.0f} MiB of {markdown.escape(room.whose)}, "
        f"{room.left / MIB:,.0f} of them free after the step was given up.",
    ]  # fmt: skip
    if run.device.kind != "cpu":
        lines[-1] += f" The device has {run.device.memory_bytes / MIB:,.0f} MiB."
    lines += ["", "## What would save how much", ""]
    if rows:
        lines += [
            markdown.table(("MiB less", "of the peak", "type", "price"), rows), "",
            "Each is for this run with nothing else changed; two together save less than their "
            "sum. Add what you choose to the command, with checkpoint.resume to go on.",
        ]  # fmt: skip
    else:
        lines += ["Nothing that the runner has: make the model or its inputs smaller."]
    if account is not None:
        header, shown = table(account, 20)
        told = f"## By module, MiB, at step {account.step} with {account.samples} samples"
        lines += ["", told, "", markdown.table(header, shown)]
    else:
        lines += ["", "The largest modules:", "", _largest(run.model)]
    return "\n".join(lines) + "\n"


def _largest(model: nn.Module) -> str:
    sizes = [
        (name or "(model)", type(module).__name__, sum(size(p) for p in module.parameters(False)))
        for name, module in model.named_modules()
    ]
    sizes.sort(key=lambda row: -row[2])
    rows = [(name, kind, f"{held / MIB:,.2f}") for name, kind, held in sizes[:10] if held]
    return markdown.table(("module", "class", "MiB of weights"), rows)


@contextmanager
def _forgetting(blocks: list[nn.Module]) -> Iterator[None]:
    """Blocks that keep their input only."""
    before = [(block, vars(block).get("forward")) for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, own in before:
            if own is None:
                del block.forward
            else:
                block.forward = own


T = TypeVar("T")


def _try(what: Callable[[], T]) -> T | None:
    try:
        return what()
    except Exception as error:  # a model may refuse what the run does not do with it
        log.debug("not predicted: %s", error)
        return None
