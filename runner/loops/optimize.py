"""Apply the techniques of a level to a model or a hand-written loop; the run behind both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import update_wrapper, wraps
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from runner.core.build.arguments import (
    Closeable,
    InMemoryDataset,
    Loss,
    as_batch,
    check_folder,
    check_model_arguments,
    check_overrides,
    check_whole_number,
    count_samples,
    device_of,
    device_overrides,
    loss_objective,
    move_to_device,
    translate_model_errors,
)
from runner.core.build.build import build, retry_smaller
from runner.core.build.setup import Components
from runner.core.config.composing import compose
from runner.core.errors import UsageError
from runner.core.interfaces.batch import Inputs, Sizes, batch_size_of, call_model
from runner.core.interfaces.hook import Step
from runner.core.interfaces.nested import describe, tensors, tree_map
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.models import modes
from runner.core.optim.optimizer import Optimizer
from runner.core.preserved_state import exclusive_random_state, large_parameters, preserve_state
from runner.core.record.summary import Summary
from runner.core.techniques.model_calls import enter_contexts
from runner.core.train.evidence import build_summary, collect_evidence, technique_statuses
from runner.core.train.step import make_step
from runner.core.train.user_values import LoopRecord

USE_LOOP = "not for a bare model; use optimize_training_loop"
USE_PIPELINE = "not for a bare model or loop; use create_training_pipeline"
NOT_FOR_A_LOOP = dict.fromkeys(("pipeline", "quantization"), USE_PIPELINE)
TRAINING_TECHNIQUES = ("whole_step", "chunked_loss", "accumulation", "fused_optimizer")
NOT_FOR_A_MODEL = {
    **dict.fromkeys(TRAINING_TECHNIQUES, USE_LOOP),
    **NOT_FOR_A_LOOP,
    "cuda_graphs": f"each call would overwrite the last one's outputs and gradients; {USE_LOOP}",
}
RUN_KEYS = frozenset(
    """
    benchmark checkpoint checks data debug evaluate job objective predict replay scan search sweep
    verify optimizer.ema optimizer.ema_warmup stability.max_consecutive_skips
    stability.max_rollbacks stability.rollback_lr_factor stability.spike stability.watch
    training.epochs training.monitor training.monitor_mode training.patience training.sanity
    training.validate_every
    """.split()
)
"""Keys, and groups of them, of what only a whole run has."""
LOOP_KEYS = {"optimizer", "schedule", "stability"}
QUIET_OVERRIDES = ("monitoring=quiet", "checkpoint=off", "training.epochs=null")
MANY_STEPS = 1_000_000  # default for `steps`: compiling pays back


def optimize(
    model: nn.Module,
    level: str = "advanced",
    *,
    example: Any = None,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Optimized:
    """Wrap the model with the techniques of `optimization=<level>` that work without a loop.

    They are applied using `example` (a tensor, a tuple by position or a dict by name), or the
    inputs of the first call. `device` moves the model (`auto`, `cpu`, `cuda:1`, …); None leaves it
    in place. `overrides` are as on the command line, e.g. `optimization.compile.enabled=false`. For
    training use `optimize_training_loop`. Raises UsageError or ConfigError.
    """
    optimized = Optimized(LazyRun("optimize", model, level, overrides, device, NOT_FOR_A_MODEL))
    if example is not None:
        optimized.prepare(example)
    return optimized


@final
class Optimized(Closeable):
    """Called like the model; `model` is the model itself, with unchanged parameters and keys.

    The model's attributes are available too. Some techniques set process-wide switches (number of
    threads, TF32), so close it or use it as a context manager. 16-bit outputs are converted to
    float32, so that a loss computed outside keeps its precision.
    """

    def __init__(self, lazy: LazyRun) -> None:
        self.lazy, self.model = lazy, lazy.model
        self.called = False
        self.grad_enabled = True  # at the last call

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as `parameters`."""
        if name.startswith("__") or name in ("lazy", "model"):  # not set while being copied
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, computed with the techniques."""
        run = self.lazy.run or self.prepare(self._as_inputs(args, kwargs))
        args = tuple(move_inputs(run, value) for value in args)
        kwargs = {name: move_inputs(run, value) for name, value in kwargs.items()}
        self.called, self.grad_enabled = True, torch.is_grad_enabled()
        while True:
            try:
                with enter_contexts(run.contexts):
                    output = run.forward(*args, **kwargs)
                return tree_map(output, _to_full_precision) if run.contexts else output
            except Exception as error:  # e.g. the compiler failed: try a simpler way
                if not any(recover(run, error) for recover in run.recoveries):
                    raise

    def prepare(self, inputs: Inputs) -> Run:
        """Apply the techniques, using these inputs as the example, unless already done."""
        return self.lazy.build_run(inputs)

    def _as_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Convert call arguments to inputs; keyword arguments without tensors are dropped."""
        if kwargs:
            bound = inspect.signature(self.model.forward).bind(*args, **kwargs).arguments
            return {name: v for name, v in bound.items() if tensors(v)}
        return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args

    def engagements(self) -> list[TechniqueStatus]:
        """Return each technique's status: requested, engaged, reason and evidence.

        Runs the model on the example, with gradients if the last call had them, which takes a few
        steps' time. Without an example yet, nothing is engaged.
        """
        run = self.lazy.run
        if run is not None and not self.called:
            device, large = device_of(self.model), large_parameters(self.model)
            with preserve_state(self.model, device=device, safe=large), torch.no_grad():
                with modes.evaluation_mode(self.model):
                    call_model(self, run.validation.peek()[0])
        return self.lazy.statuses(self.grad_enabled)

    def close(self) -> None:
        """Undo every global switch; the model is restored, and this object cannot be called."""
        self.lazy.close()


def optimize_model(
    level: str = "advanced",
    *,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a module class, or a function that returns a module, to return an `Optimized`.

    A decorated class becomes a function and cannot be subclassed; to avoid that, call `optimize`.
    A function whose first parameter is called `model` is a step function instead: it is called with
    the `Optimized` of the model that it is given. These are kept, one per model, until the
    function's `close()` is called.
    """
    if not isinstance(level, str):
        raise UsageError("optimize_model: level must be a name; write @optimize_model()")

    def decorate(factory: Any) -> Callable[..., Any]:
        is_class = isinstance(factory, type)
        if not callable(factory) or (is_class and not issubclass(factory, nn.Module)):
            problem = "must be a subclass of torch.nn.Module, or a function that returns a module"
            raise UsageError(f"optimize_model: {factory!r} {problem}")
        if not is_class and _first_parameter(factory) == "model":
            return StepFunction(factory, level, device, overrides)

        @wraps(factory, updated=())
        def make(*args: Any, **kwargs: Any) -> Optimized:
            return optimize(factory(*args, **kwargs), level, device=device, overrides=overrides)

        return make

    return decorate


class StepFunction(Closeable):
    """A function of a user's loop whose first argument is replaced by the optimized model."""

    def __init__(
        self,
        function: Callable[..., Any],
        level: str,
        device: str | torch.device | None,
        overrides: Sequence[str],
    ) -> None:
        update_wrapper(self, function)
        self.function = function
        self.options: Any = {"level": level, "device": device, "overrides": overrides}
        self.optimized: dict[int, Optimized] = {}  # by the id of the model, which it holds

    def __call__(self, model: nn.Module | Optimized, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, called with the optimized model."""
        if isinstance(model, Optimized):
            return self.function(model, *args, **kwargs)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"optimize_model: {self.function.__name__}: model must be a torch.nn.Module, got "
                f"{describe(model)}; for a function that makes a model, rename its first parameter"
            )
        optimized = self.optimized.get(id(model))
        if optimized is None or optimized.lazy.closed:
            optimized = self.optimized[id(model)] = optimize(model, **self.options)
        return self.function(optimized, *args, **kwargs)

    def close(self) -> None:
        """Restore all models, and undo every global switch, the latest first."""
        while self.optimized:
            self.optimized.popitem()[1].close()


def _first_parameter(function: Callable[..., Any]) -> str:
    """Return the name of the first parameter; "" if there is none, or it is not known."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # of code without a signature
        return ""


def move_inputs(run: Run, inputs: Inputs) -> Inputs:
    """Move inputs to the run's device, in the memory format that its techniques require."""
    inputs = move_to_device(inputs, run.device.torch)
    for move in run.placements:
        inputs = move((inputs, None))[0]
    return inputs


def _to_full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(eq=False, repr=False)
class LazyRun(Closeable):
    """The settings of a run around a user's model, and the run itself after the first batch."""

    caller: str  # the function that was called, for messages
    model: nn.Module
    level: str
    overrides: Sequence[str]
    device: str | torch.device | None  # None: where the model is
    not_applicable: dict[str, str]  # techniques that do not apply, with the reason
    optimizer: Optimizer | None = None
    loss_fn: Loss | None = None
    steps: int | None = None
    folder: Path | None = None  # of what a loop logs
    run: Run | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        loss = self.loss_fn or mean_output
        check_model_arguments(
            self.caller,
            self.model,
            loss_fn=loss,
            optimizer=self.optimizer,
            overrides=self.overrides,
        )
        for text, key in check_overrides(self.caller, self.overrides):
            prefixes = {".".join(key.split(".")[:length]) for length in (1, 2, 3)}
            if prefixes & RUN_KEYS:
                raise UsageError(f"{self.caller}: {text} has no effect: {USE_PIPELINE}")
            is_for_loops = prefixes & LOOP_KEYS and key != "optimizer.freeze"
            if self.optimizer is None and is_for_loops:
                raise UsageError(f"{self.caller}: {text} has no effect: {USE_LOOP}")
        # report mistakes now, since a batch may come much later
        device = device_of(self.model) if self.device is None else self.device
        level, steps = f"optimization={self.level}", f"training.steps={self.steps or MANY_STEPS}"
        overrides = [level, *device_overrides(device), *QUIET_OVERRIDES, steps, *self.overrides]
        self.config = compose(overrides)
        self.objective = loss_objective(loss)
        requested = [name for name, t in self.config.optimization.techniques() if t.enabled]
        self.not_applied = self.not_applicable.keys() & requested

    def build_run(self, inputs: Inputs, target: Any = None) -> Run:
        """Return the run, built around this batch at the first call."""
        if self.run is None:
            if self.closed:
                raise UsageError(f"{self.caller}: it is closed; create another one")
            with translate_model_errors(self.caller, inputs), stash_gradients(self.model):
                self.run = self._build(inputs, target)  # some techniques try a step
        return self.run

    def statuses(self, grad_enabled: bool = True) -> list[TechniqueStatus]:
        """Return each technique's status. Runs the model, with gradients if `grad_enabled`."""
        if self.run is None:
            reason = "closed" if self.closed else "waits for the first batch (or an example)"
            requested = self.config.optimization.techniques()
            return [TechniqueStatus(name, t.enabled, False, reason) for name, t in requested]
        with stash_gradients(self.model), torch.set_grad_enabled(grad_enabled):
            collect_evidence(self.run)
        return [
            replace(row, requested=True, reason=self.not_applicable[row.name])
            if row.name in self.not_applied
            else row
            for row in technique_statuses(self.run)
        ]

    def close(self) -> None:
        """Undo every global switch; model and optimizer behave as before."""
        self.closed = True
        if self.run is not None:
            self.run.scope.close()
            self.run = None

    def _build(self, inputs: Inputs, target: Any) -> Run:
        """Build the run for batches of these shapes, without the techniques in `not_applied`."""
        n = count_samples(inputs, f"{self.caller}: the batch")
        optimization = replace(self.config.optimization)
        for name in self.not_applied:
            setattr(optimization, name, type(getattr(optimization, name))(enabled=False))
        micro = self.config.training.micro_batch
        training = replace(self.config.training, batch_size=n, micro_batch=micro and min(micro, n))
        config = replace(self.config, training=training, optimization=optimization)
        host, rows = torch.device("cpu"), np.arange(n)
        labels = torch.zeros(n, dtype=torch.int64) if target is None else target
        inputs, labels = move_to_device((inputs, labels), host)
        data = InMemoryDataset(inputs, labels, Sizes("given"), (rows, rows))
        compiled = [(module, module._compiled_call_impl) for module in self.model.modules()]
        tensors_before = [*self.model.parameters(), *self.model.buffers()]
        # techniques may change the memory format of images and their kernels
        may_change = (t for t in tensors_before if t.layout is torch.strided and t.ndim in (4, 5))
        layouts = [(tensor, tensor.stride()) for tensor in may_change]
        device = device_of(self.model)
        dummy = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        optimizer = self.optimizer or torch.optim.SGD([dummy], lr=0.0)  # dummy: not trained
        run = build(config, components=Components(self.model, data, self.objective, optimizer))
        for module, implementation in compiled:  # techniques compile in place
            run.scope.callback(setattr, module, "_compiled_call_impl", implementation)
        run.scope.callback(_restore_layouts, layouts)
        if self.loss_fn is None:  # without a loop no batch can be halved
            run.recoveries = [r for r in run.recoveries if r is not retry_smaller]
        # do not reseed the random generators of the caller's loop
        run.device = replace(run.device, reseed=lambda seed: None)
        return run


def optimize_training_loop(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Loss,
    *,
    level: str = "advanced",
    example: Any = None,
    steps: int | None = None,
    clip_norm: float | None = 1.0,
    guard: bool = True,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
    folder: str | Path | None = None,
) -> TrainingLoop:
    """Return an object that makes a loop's steps with the techniques of `optimization=<level>`.

    They are applied using `example`, a batch, or the first batch. `steps` is the expected number of
    steps, if known: compiling pays back over many. Clipping, guard and optimizer are as in
    `train_step`, device and overrides as in `optimize`; `training.micro_batch=8` splits each batch.
    `folder` is where the loop's `log` writes. Raises UsageError or ConfigError.
    """
    caller, limit = "optimize_training_loop", "null" if clip_norm is None else clip_norm
    check_model_arguments(caller, model, loss_fn=loss_fn)
    if steps is not None:
        check_whole_number(caller, "steps", steps, 1)
    own = [f"stability.clip_norm={limit}", f"stability.guard={str(guard).lower()}", *overrides]
    where = None if folder is None else check_folder(caller, folder)
    given = optimizer, loss_fn, steps, where
    loop = TrainingLoop(caller, model, level, own, device, NOT_FOR_A_LOOP, *given)
    if example is not None:
        loop.build_run(*as_batch(example, caller))
    return loop


@final
@dataclass(eq=False, repr=False)
class TrainingLoop(LazyRun):
    """Makes a step when called with a batch. Close it, or use it as a context manager."""

    skipped: Tensor | None = None  # number so far, on the device
    record: LoopRecord | None = None  # what `log` has written; None: nothing

    @exclusive_random_state("optimize_training_loop")
    def __call__(self, batch: Any) -> Step:
        """Make one step on (inputs, target), without host-device synchronisation."""
        inputs, target = as_batch(batch, self.caller)
        run = self.build_run(inputs, target)
        run.stopwatch.start()
        inputs, target = move_inputs(run, inputs), move_to_device(target, run.device.torch)
        run.stopwatch.split("data")
        step, _ = make_step(run, (inputs, target))
        run.progress.step += 1
        run.stopwatch.stop(batch_size_of(target))
        run.stopwatch.pause(wait=False)  # what the loop does until the next call does not count
        self.skipped = step.skipped if self.skipped is None else self.skipped + step.skipped
        if self.record is not None and run.progress.step % run.report_every == 0:
            self.record.write()
        return step

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Record own numbers in the folder's `metrics.jsonl` and TensorBoard, as `Run.log`.

        `step` is the last one by default. Rows of an earlier loop in the folder stay. Raises
        UsageError without a folder, too, and for the folder of a run.
        """
        if self.record is None:
            self.record = LoopRecord(self.caller, self.folder, self.closed)
        last = 0 if self.run is None else self.run.progress.step
        self.record.log(values, last if step is None else step)

    def close(self) -> None:
        """Write all that was logged; undo every global switch."""
        if self.record is not None:
            self.record.close()
        super().close()

    def summary(self) -> Summary:
        """Return steps, time, memory and techniques so far. Synchronises and runs the model."""
        if (run := self.run) is None:
            raise UsageError("optimize_training_loop: no batch yet, or it is closed")
        run.device.synchronize()
        run.stopwatch.pause()
        run.progress.skipped = 0 if self.skipped is None else int(self.skipped)
        techniques = self.statuses()
        summary = build_summary(run, "running")
        summary.techniques = techniques
        return summary


def _restore_layouts(layouts: list[tuple[Tensor, tuple[int, ...]]]) -> None:
    for tensor, strides in layouts:
        for value in (tensor, tensor.grad):
            if value is not None and value.stride() != strides:
                plain = torch.empty_strided(
                    value.shape, strides, dtype=value.dtype, device=value.device
                )
                value.data = plain.copy_(value.detach())


@contextmanager
def stash_gradients(model: nn.Module) -> Iterator[None]:
    """Within, gradients are enabled and initially None; afterwards the old ones are restored."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def mean_output(output: Any, target: Any = None) -> Tensor:
    """Return the mean of all floats in an output: a dummy loss that reaches every operator."""
    nest = dict(output) if isinstance(output, dict) else output  # flatten dict subclasses
    floats = [t for t in tensors(nest) if t.is_floating_point()]
    if not floats:
        raise UsageError(f"the model's output must hold floats, got {describe(output)}")
    loss = torch.stack([t.float().mean() for t in floats]).sum()
    if torch.is_grad_enabled() and not loss.requires_grad:  # a frozen model
        loss = loss + torch.zeros((), dtype=torch.float32, device=loss.device, requires_grad=True)
    return loss
