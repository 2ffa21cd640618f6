"""A model, or a hand-written loop, with the techniques of a level."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from runner.data.batch import Inputs, call, count
from runner.data.nested import tensors, tree_map
from runner.errors import UsageError
from runner.library import batches
from runner.library.lazy_run import (
    LazyRun,
    Loss,
    check_loss_fn,
    device_of,
    objective_of,
    run_contexts,
)
from runner.models import modes
from runner.models.preserved_state import large_parameters, preserve_state
from runner.optim.optimizer import Optimizer
from runner.random_state import claim_random_state, exclusive_random_state, release_random_state
from runner.techniques.base import Choice, TechniqueStatus
from runner.training.evidence import build_summary
from runner.training.hook import Step
from runner.training.run import Run
from runner.training.step import make_step
from runner.training.summary import Summary

NOT_FOR_A_MODEL = {
    "whole_step": "not for a bare model: it makes the whole step; use optimize_training_loop",
    "chunked_loss": "not for a bare model: it is about the loss; use optimize_training_loop",
    "accumulation": "not for a bare model: it cuts a loop's batches; use optimize_training_loop",
    "pipeline": "not for a bare model: it is about loading data; use create_training_pipeline",
    "quantization": "not for a bare model: its int8 copy is judged on data that are held out; "
    "use create_training_pipeline",
}
NO_OPTIMIZER = "not for a bare model: it has no optimizer; use optimize(model, optimizer=…)"


def optimize(
    model: nn.Module,
    level: str = "advanced",
    *,
    example: Any = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Optimized:
    """The model with the techniques of `optimization=<level>` that make sense without a loop.

    They are applied to the example (a tensor, a tuple by position or a dict by name), or where
    there is none to what the first call gets. `device` is where the model shall be (`auto`, `cpu`,
    `cuda:1`, …); None leaves it where it is. `overrides` are typed as on the command line, such as
    `optimization.compile.enabled=false`. Raises UsageError or ConfigError.
    """
    return Optimized(model, level, example, optimizer, device, overrides)


@final
class Optimized:
    """Called as the model is; `model` is the model itself, with its own parameters and keys.

    Some techniques flip switches of the whole process (the number of threads, TF32), so close it,
    or use it as a context manager. Outputs in 16 bits come back as float32, so that a loss that is
    computed outside loses nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        level: str = "advanced",
        example: Any = None,
        optimizer: Optimizer | None = None,
        device: str | torch.device | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.settings = (level, None, optimizer, device, tuple(overrides))
        left_out = NOT_FOR_A_MODEL
        if optimizer is None:
            left_out = left_out | {"fused_optimizer": NO_OPTIMIZER}
        self.lazy = LazyRun(
            "optimize", model, level, overrides, device, left_out, optimizer=optimizer
        )
        self.called = False
        self.inside = False  # the model's own call, in the middle of ours
        if example is not None:
            self.ready(example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, computed under the techniques."""
        run = self.lazy.run or self.ready(self._as_inputs(args, kwargs))
        args = tuple(place_inputs(run, value) for value in args)
        kwargs = {name: place_inputs(run, value) for name, value in kwargs.items()}
        while True:
            try:
                return self._forward(run, args, kwargs)
            except Exception as error:
                if not any(recover(run, error) for recover in run.recoveries):
                    raise

    def ready(self, inputs: Inputs) -> Run:
        """Apply the techniques, with these inputs as the example, if that was not done yet."""
        self.inside = True
        try:
            return self.lazy.build_run(inputs)
        finally:
            self.inside = False

    def _forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with run_contexts(run):
            output = self.call_model(*args, **kwargs)
        return tree_map(output, _full) if run.contexts else output

    def call_model(self, *args: Any, **kwargs: Any) -> Any:
        """The run's own forward, without its contexts: for whoever has entered them."""
        run = self.lazy.run
        if run is None:
            raise UsageError("optimize: it was closed; make another one")
        self.inside = self.called = True
        try:
            return run.forward(*args, **kwargs)
        finally:
            self.inside = False

    def _as_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """What a call got, as the inputs of a batch; what is no tensor is left to its default."""
        if kwargs:
            bound = inspect.signature(self.model.forward).bind(*args, **kwargs).arguments
            return {name: v for name, v in bound.items() if tensors(v)}
        return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args

    def engagements(self) -> list[TechniqueStatus]:
        """Each technique: requested or not, engaged or not, the reason and the evidence.

        Runs the model on the example, so it takes a step's time. Before there is one, nothing is
        engaged.
        """
        run = self.lazy.run
        if run is not None and not self.called:
            where, large = device_of(self.model), large_parameters(self.model)
            with (
                preserve_state(self.model, device=where, safe=large),
                modes.evaluation_mode(self.model),
            ):
                with torch.no_grad():
                    inputs = run.validation.peek()[0]
                    if isinstance(inputs, dict):
                        self(**inputs)
                    else:
                        self(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
        self.inside = True
        try:
            return self.lazy.rows()
        finally:
            self.inside = False

    @property
    def choices(self) -> list[Choice]:
        """What was decided automatically, and why."""
        return [] if self.lazy.run is None else list(self.lazy.run.choices)

    def close(self) -> None:
        """Undo every global switch; the model is as it was, and this can no longer be called."""
        self.lazy.close()

    def __enter__(self) -> Optimized:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is put together afresh, around the copy of the model."""
        return Optimized, (self.model, *self.settings)


Made = TypeVar("Made", bound=Callable[..., Any])


def optimize_model(
    level: str = "advanced",
    *,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Callable[[Made], Made]:
    """Decorate a module's class, or a function that returns a module.

    Instances of the class stay what they are, and calling one goes through its `optimized`
    (an `Optimized`). The function returns an `Optimized` in place of the module.
    """
    if not isinstance(level, str):
        raise UsageError("optimize_model: level is missing its brackets; write @optimize_model()")

    def decorate(made: Any) -> Any:
        if isinstance(made, type) and issubclass(made, nn.Module):
            return _decorate_class(made, level, device, overrides)
        if isinstance(made, type) or not callable(made):
            raise UsageError(
                f"optimize_model: {made!r} is no subclass of torch.nn.Module and no function that "
                "returns one"
            )

        @wraps(made)
        def factory(*args: Any, **kwargs: Any) -> Optimized:
            return Optimized(made(*args, **kwargs), level, None, None, device, overrides)

        return factory

    return decorate


def _decorate_class(
    made: type[nn.Module], level: str, device: str | torch.device | None, overrides: Sequence[str]
) -> type[nn.Module]:
    plain = made.__call__

    def optimized(self: nn.Module) -> Optimized:
        found: Optimized | None = self.__dict__.get("_optimized")
        if found is None:
            found = Optimized(self, level, None, None, device, overrides)
            self.__dict__["_optimized"] = found
        return found

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "_plain" in self.__dict__:
            return plain(self, *args, **kwargs)
        mine = optimized(self)
        if mine.inside or mine.lazy.closed:
            return plain(self, *args, **kwargs)
        return mine(*args, **kwargs)

    def __getstate__(self: nn.Module) -> dict[str, Any]:
        """A copy is put together by itself, but for one that is made to time the model."""
        mine = self.__dict__.get("_optimized")
        mark = {"_plain": True} if mine is not None and mine.inside else {}
        return {k: v for k, v in self.__dict__.items() if k != "_optimized"} | mark

    cls: Any = made
    cls.__getstate__ = __getstate__
    cls.optimized = property(optimized, doc="What calling it goes through.")
    cls.__call__ = __call__
    return made


def place_inputs(run: Run, inputs: Inputs) -> Inputs:
    """The inputs on the run's device, in the memory order that its techniques want."""
    inputs = batches.moved(inputs, run.device.torch)
    for place in run.placements:
        inputs = place((inputs, None))[0]
    return inputs


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


NOT_FOR_A_LOOP = {
    "pipeline": "not for a hand-written loop, which loads its data; use create_training_pipeline",
    "quantization": "not for a hand-written loop: its int8 copy is judged on data that are held "
    "out; use create_training_pipeline",
}


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
) -> TrainingLoop:
    """What makes the steps of a hand-written loop with the techniques of `optimization=<level>`.

    It is put together around `example`, a batch, or the first one that comes. `steps` is how many
    there will be, if that is known: compiling pays back over many. Clipping, guard and optimizer
    are as in `train_step`, device and overrides as in `optimize`; `training.micro_batch=8` cuts
    each batch. Raises UsageError or ConfigError.
    """
    check_loss_fn("optimize_training_loop", loss_fn)
    if steps is not None and steps < 1:
        raise UsageError(f"optimize_training_loop: steps={steps} is no length; use 1 or more")
    limit = "null" if clip_norm is None else clip_norm
    lazy = LazyRun(
        "optimize_training_loop",
        model,
        level,
        [f"stability.clip_norm={limit}", f"stability.guard={str(guard).lower()}", *overrides],
        device,
        NOT_FOR_A_LOOP,
        optimizer=optimizer,
        objective=objective_of(loss_fn),
        steps=steps,
    )
    loop = TrainingLoop(lazy)
    if example is not None:
        lazy.build_run(*batches.as_batch(example, lazy.who))
    return loop


@final
class TrainingLoop:
    """Called with a batch, makes a step. Close it when done, or use it as a context manager."""

    def __init__(self, lazy: LazyRun) -> None:
        self.lazy = lazy
        self.model = lazy.model
        self.skipped: Tensor | None = None  # so far, on the device

    @exclusive_random_state("optimize_training_loop")
    def __call__(self, batch: Any) -> Step:
        """One step over (inputs, target); what it returns is on the device, and not waited for."""
        claim_random_state(self, "optimize_training_loop")
        inputs, target = batches.as_batch(batch, self.lazy.who)
        run = self.lazy.build_run(inputs, target)
        if not run.watch.running:
            run.watch.start()
        inputs, target = place_inputs(run, inputs), batches.moved(target, run.device.torch)
        run.watch.split("data")
        step, _ = make_step(run, (inputs, target))
        run.progress.step += 1
        run.watch.stop(count(target))
        self.skipped = step.skipped if self.skipped is None else self.skipped + step.skipped
        return step

    def over(self, loader: Iterable[Any]) -> Iterator[Step]:
        """A step for each batch of the loader; the wait for data is in the summary."""
        source = iter(loader)
        while True:
            if self.lazy.run is not None:
                self.lazy.run.watch.start()
            try:
                batch = next(source)
            except StopIteration:
                break
            yield self(batch)
        if self.lazy.run is not None:
            self.lazy.run.watch.running = False

    def predict(self, inputs: Any) -> Any:
        """The model's output, computed as in a step; for an evaluation between steps."""
        run = self._running()
        with run_contexts(run):
            return call(run.forward, place_inputs(run, inputs))

    def engagements(self) -> list[TechniqueStatus]:
        """Each technique: requested or not, engaged or not, the reason and the evidence."""
        return self.lazy.rows()

    def summary(self) -> Summary:
        """Steps, time, memory and techniques so far. Makes the host wait, and runs the model."""
        run = self._running()
        run.device.synchronize()
        run.progress.skipped = 0 if self.skipped is None else int(self.skipped)
        rows = self.engagements()
        summary = build_summary(run, "running")
        summary.techniques = rows
        return summary

    def close(self) -> None:
        """Undo every global switch; the model and its optimizer are as if they were never here."""
        release_random_state(self)
        self.lazy.close()

    def _running(self) -> Run:
        if self.lazy.run is None:
            raise UsageError("optimize_training_loop: no batch has come yet (or it was closed)")
        return self.lazy.run

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
