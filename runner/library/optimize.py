"""A model, faster: the techniques of a level on a model that somebody else calls or trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from runner import modes
from runner.batch import Inputs
from runner.errors import UsageError
from runner.library import batches
from runner.library.assembly import Assembly, device_of, entered
from runner.nest import mapped, tensors
from runner.optim.optimizer import Optimizer
from runner.run import Run
from runner.technique import Choice, Engagement
from runner.untouched import large_parameters, untouched

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
        self.assembly = Assembly(
            "optimize", model, level, overrides, device, left_out, optimizer=optimizer
        )
        self.called = False
        self.inside = False  # the model's own call, in the middle of ours
        if example is not None:
            self.ready(example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, computed under the techniques."""
        run = self.assembly.run or self.ready(self._as_inputs(args, kwargs))
        args = tuple(placed(run, value) for value in args)
        kwargs = {name: placed(run, value) for name, value in kwargs.items()}
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
            return self.assembly.assemble(inputs)
        finally:
            self.inside = False

    def _forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with entered(run):
            output = self.within(*args, **kwargs)
        return mapped(output, _full) if run.contexts else output

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """The run's own forward, without its contexts: for whoever has entered them."""
        run = self.assembly.run
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

    def engagements(self) -> list[Engagement]:
        """Each technique: requested or not, engaged or not, the reason and the evidence.

        Runs the model on the example, so it takes a step's time. Before there is one, nothing is
        engaged.
        """
        run = self.assembly.run
        if run is not None and not self.called:
            where, large = device_of(self.model), large_parameters(self.model)
            with untouched(self.model, device=where, safe=large), modes.evaluating(self.model):
                with torch.no_grad():
                    inputs = run.validation.peek()[0]
                    if isinstance(inputs, dict):
                        self(**inputs)
                    else:
                        self(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
        self.inside = True
        try:
            return self.assembly.rows()
        finally:
            self.inside = False

    @property
    def choices(self) -> list[Choice]:
        """What was decided automatically, and why."""
        return [] if self.assembly.run is None else list(self.assembly.run.choices)

    def close(self) -> None:
        """Undo every global switch; the model is as it was, and this can no longer be called."""
        self.assembly.close()

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
        if mine.inside or mine.assembly.closed:
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


def placed(run: Run, inputs: Inputs) -> Inputs:
    """The inputs on the run's device, in the memory order that its techniques want."""
    inputs = batches.moved(inputs, run.device.torch)
    for place in run.placements:
        inputs = place((inputs, None))[0]
    return inputs


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
