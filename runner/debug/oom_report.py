"""What holds the memory of a run that ran out of it: `debug/out_of_memory.md`."""

from __future__ import annotations

import logging

from runner.debug.memory_breakdown import Breakdown, predict_step
from runner.device import resources
from runner.record import markdown
from runner.record.storage import replace_text
from runner.training.run import Run

log = logging.getLogger("runner")

FILE = "debug/out_of_memory.md"
MIB = 2**20


def write_report(run: Run, reason: str, breakdown: Breakdown | None = None) -> None:
    """Write what holds the memory, ranked; an error here is logged, the run's own error counts."""
    if run.folder is None:
        return
    try:
        text = _report(run, reason, breakdown)
        (run.folder / FILE).parent.mkdir(exist_ok=True)
        replace_text(run.folder / FILE, text)
        run.recorder.text("memory/out_of_memory", text, run.progress.step)
        log.warning("what holds the memory is in %s", run.folder / FILE)
    except Exception as error:  # memory is short, and a model may be anything
        log.warning("no %s: %s: %s", FILE, type(error).__name__, error)


def _report(run: Run, reason: str, breakdown: Breakdown | None) -> str:
    room = resources.room()
    left = (
        f"There are {room.limit / MIB:,.0f} MiB of {markdown.escape(room.whose)}, "
        f"{room.left / MIB:,.0f} of them free after the step was given up."
    )
    if run.device.kind != "cpu":
        left += f" The device has {run.device.memory_bytes / MIB:,.0f} MiB."
    lines = ["# Out of memory", "", markdown.escape(reason), "", left, "", *_predicted(run), ""]
    if breakdown is not None:
        title = f"## By module, MiB, at step {breakdown.step} with {breakdown.samples} samples"
        lines += [title, "", markdown.table(*breakdown.table(20))]
    else:
        sizes = [
            (
                name or "(model)",
                type(module).__name__,
                sum(p.nbytes for p in module.parameters(False)),
            )
            for name, module in run.model.named_modules()
        ]
        sizes.sort(key=lambda row: -row[2])
        rows = [(name, kind, f"{held / MIB:,.2f}") for name, kind, held in sizes[:10] if held]
        table = markdown.table(("module", "class", "MiB of weights"), rows)
        lines += ["The largest modules:", "", table]
    return "\n".join(lines) + "\n"


def _predicted(run: Run) -> list[str]:
    """What a step holds by what it is for, largest first; a model may refuse to be traced."""
    try:
        step = predict_step(run, min(run.micro_batch, run.train.samples(0)))
    except Exception as error:
        log.debug("no prediction of the memory: %s", error)
        return []
    parts = {
        "weights and buffers": step.parameters,
        "gradients": step.gradients,
        "state of the optimizer, average": step.optimizer,
        "copies for checkpoints and skipped steps": step.copies,
        f"activations, batch and temporaries ({step.saved / MIB:,.1f} kept for the backward)": (
            step.activations
        ),
    }
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    rows = [
        (name, f"{held / MIB:,.1f}") for name, held in (*ranked, ("all, at the peak", step.peak))
    ]
    about = f"A step with {step.samples} samples at a time, traced without its data:"
    return [about, "", markdown.table(("what", "MiB"), rows)]
