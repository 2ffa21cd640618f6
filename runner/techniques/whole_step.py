"""Forward, backward, clip, guard and optimizer as one compiled graph."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.techniques import compiler
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.cost import compile_break_even
from runner.techniques.fused_optimizer import fastest
from runner.training.hook import Hook
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device


log = logging.getLogger("runner")

EVENTS = ("around", "on_gradients")  # what a step in one graph has no place for


@dataclass
class WholeStep(Technique):
    """The most that compiling can give: nothing of a step is left to the interpreter.

    For full batches; the smaller last one of an epoch, and steps at which a hook looks at the
    gradients, are made the ordinary way, with the same weights and optimizer state.
    """

    min_steps: int | None = 0  # shorter runs stay eager; null: below the break-even, from timing
    cpp_wrapper: bool = True  # CPU: also what calls the kernels is compiled

    def __post_init__(self) -> None:
        if self.min_steps is not None and self.min_steps < 0:
            raise ConfigError("optimization.whole_step.min_steps", "is negative", "use 0 or more")

    def unavailable(self, device: Device) -> str | None:
        """It needs a compiler, and a torch whose tracer takes gradients inside a graph."""
        return compiler.missing(device.kind) or compiler.no_gradients_in_graphs()

    def apply(self, draft: RunBuilder) -> str | None:
        """Leave the order with the draft; the graph is made once there is an optimizer."""
        if draft.micro_batch < draft.batch_size:
            return f"micro-batches of {draft.micro_batch}: the step is several backward passes"
        if draft.recompute is not None:
            return "recompute needs a boundary between forward and backward, one graph has none"
        options, reason = fastest(draft.optimizer_class, draft.model)
        if reason is not None:
            return reason
        reason = compile_break_even(self.min_steps, draft)
        if reason is not None:
            return reason
        if draft.device.kind == "cpu" and draft.objective.indices is None:
            draft.index_limit = _index_limit(draft)  # before anything of the draft is changed
        compiler.prepare(draft.scope)
        compiler.check_tokens(draft)
        compiler.allow_gradients_in_graphs(draft.scope)
        draft.whole_step = compiler.options(draft, self.cpp_wrapper)
        # with whose state the graph works, and which makes the steps that are not full batches
        draft.optimizer_options.update(options)
        return None

    def engaged(self, run: Run) -> Evidence:
        """One graph, and how many of the steps it made."""
        whole = run.whole
        if whole is None:
            return Evidence(False, run.fallen.get("whole_step", "no step was made in one graph"))
        made = max(len(run.watch.steps), whole.steps)  # a loop of the user's own is not timed
        facts: dict[str, Any] = {"steps_in_one_graph": whole.steps, **compiler.compilation_facts()}
        if not whole.steps:
            return Evidence(False, kept_out(run) or "no full batch came", facts)
        return Evidence.of_share(whole.steps, made, "steps made in one graph", **facts)


def kept_out(run: Run, eager: bool = False) -> str:
    """What looks at every step, so that none is made in one graph; empty where nothing does.

    With `eager`, what has every step made uncompiled.
    """
    for hook in run.hooks:
        looks = any(getattr(type(hook), event) is not getattr(Hook, event) for event in EVENTS)
        if hook.every == 1 and looks and (hook.eager or not eager):
            tool = getattr(hook, "name", "")  # a debug tool has one, which is that of its key
            name, slower = type(hook).__name__, ""
            if tool:
                name, slower = f"debug={tool}", f"; debug.{tool}.every=50 leaves most of it"
            how = "uncompiled" if hook.eager else "in more than one graph"
            return f"{name} looks at every step, which is then made {how}{slower}"
    return ""


def warn_kept_out(run: Run) -> None:
    """Say at the start what will come of nothing."""
    compiled = run.compilation is not None and run.compilation.mode
    if run.whole is not None and (reason := kept_out(run)):
        log.warning("optimization.whole_step: %s", reason)
    elif run.whole is None and compiled and (reason := kept_out(run, eager=True)):
        log.warning("optimization.compile: %s", reason)


def _index_limit(draft: RunBuilder) -> int | None:
    """The number of classes that a loss of the user's own picks from, by the shapes; else None.

    On a CPU compiled code ends the process at an index that is out of range.
    """
    import torch

    from runner.techniques import trial

    inputs, target = trial.batch(draft, draft.micro_batch)
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    with trial.untouched(draft), torch.no_grad():
        output = trial.forward(draft, inputs)
    output = getattr(output, "logits", output)
    if not isinstance(output, torch.Tensor) or output.ndim < 2:
        return None
    if output.shape[:-1] == target.shape:
        return int(output.shape[-1])
    if output.shape[:1] + output.shape[2:] == target.shape:
        return int(output.shape[1])
    return None
