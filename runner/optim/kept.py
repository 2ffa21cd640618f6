"""What an optimizer of torch keeps of a weight, learned from a tiny one of its own kind."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.optim.optimizer import Optimizer
from runner.optimizer_origin import is_torchs

PLAIN = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
"""Options of how an update is computed; what is kept is the same."""
REFUSALS = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError)
"""What an update raises of torch's optimizers that lacks something, or is not for such a weight."""


def fitting(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What of a `state_dict` the optimizer can go on from; ValueError where that is not possible.

    What was kept for an option that is now off is left out, and weights of which nothing was kept
    have had no update. A class of the user's own is taken at its word, but for the form of what
    the class of torch keeps that it is made from.
    """
    groups = [saved["param_groups"], optimizer.param_groups]
    theirs, ours = ([len(group["params"]) for group in side] for side in groups)
    if base_of(optimizer) is None or theirs != ours:  # the second torch refuses, in its own words
        return dict(saved)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if numbers != list(range(len(numbers))) or not saved["state"].keys() <= set(numbers):
        raise ValueError("an optimizer's state is by the numbers of its weights, and this is not")
    samples, state = Samples(optimizer), {}
    for number, (group, weight) in zip(numbers, _weights(optimizer), strict=True):
        kept = saved["state"].get(number, {})
        if fits := samples.fitting(group, weight, kept):
            state[number] = fits
    return {**saved, "state": state}


def check_shapes(optimizer: Optimizer) -> None:
    """Raise ValueError where state of the optimizer's own has not the form that it gives it.

    Fused kernels read and write beyond the end of moments that are smaller than their weights.
    """
    if base_of(optimizer) is None:
        return
    samples = Samples(optimizer)
    for group, weight in _weights(optimizer):
        sample = samples.of(group, weight) if optimizer.state.get(weight) else None
        for name, value in optimizer.state.get(weight, {}).items():
            if sample is not None and name in sample.state and value is not None:
                samples.check(sample, name, value, weight)


def base_of(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch that it is, or is made from; fused kernels come with it."""
    own = (cls for cls in type(optimizer).__mro__ if cls is not Optimizer)
    return next((c for c in own if c is getattr(torch.optim, c.__name__, None)), None)


class Samples:
    """A sample for each group and number of dimensions, made when it is first asked for."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.cls = base_of(optimizer) or type(optimizer)
        self.own = not is_torchs(type(optimizer))
        self.made: dict[tuple[int, int, bool], Sample | None] = {}

    def of(self, group: Mapping[str, Any], weight: Tensor) -> Sample | None:
        """The one for such weights; None where torch has no update for a plain one."""
        key = id(group), weight.ndim, weight.is_complex()
        if key not in self.made:
            try:
                self.made[key] = Sample(self.cls, group, weight.ndim, weight.is_complex())
            except REFUSALS:  # such as of a sparse optimizer, or one that wants a closure
                self.made[key] = None
        return self.made[key]

    def fitting(
        self, group: Mapping[str, Any], weight: Tensor, kept: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What of that the optimizer goes on from; ValueError where it cannot."""
        if not isinstance(kept, Mapping):
            raise ValueError(f"the state of a weight is a {type(kept).__name__}")
        sample = self.of(group, weight)
        if sample is None:
            return dict(kept)
        there = {name: value for name, value in kept.items() if value is not None}
        if self.own:
            for name in there.keys() & sample.state.keys():
                self.check(sample, name, there[name], weight)
            return dict(kept)
        if not there.keys() <= sample.ever:
            raise ValueError(f"{sample.differs(there)}: it was another optimizer")
        fits = {name: value for name, value in there.items() if name in sample.state}
        if not sample.goes_on_with(fits):
            missing = _listed(sample.state.keys() - fits.keys())
            raise ValueError(f"{sample.differs(there)}: {missing} is missing")
        for name, value in fits.items():
            sample.check(name, value, weight)
        return fits

    def check(self, sample: Sample, name: str, value: Any, weight: Tensor) -> None:
        """As `Sample.check`; but a step() of the user's own may count in Python numbers."""
        if not self.own or isinstance(value, Tensor):
            sample.check(name, value, weight)


class Sample:
    """A tiny weight and an optimizer of that class and with those options that has updated it.

    No two of the weight's dimensions are of one size, so that what is kept of it shows which of
    them it has. It takes no part in the run: it lies on the host, draws nothing and calls no hook.
    It takes 0.3 ms.
    """

    def __init__(
        self, cls: type[Optimizer], group: Mapping[str, Any], ndim: int, is_complex: bool
    ) -> None:
        self.cls, self.group = cls, group
        kind = torch.complex64 if is_complex else torch.float32
        self.weight = nn.Parameter(torch.ones(tuple(range(2, 2 + ndim)), dtype=kind, device="cpu"))
        self.state = self._updated({})
        on = {name: _on(value) for name, value in group.items()}
        self.ever = self.state.keys() | self._updated(on).keys()  # whichever options are on
        self.enough: dict[frozenset[str], bool] = {frozenset(self.state): True}

    def goes_on_with(self, names: Iterable[str]) -> bool:
        """Whether an update makes what else it needs by itself."""
        some = frozenset(names)
        if some not in self.enough:
            try:
                self._updated({}, {name: self.state[name].clone() for name in some})
                self.enough[some] = True
            except REFUSALS:
                self.enough[some] = False
        return self.enough[some]

    def check(self, name: str, value: Any, weight: Tensor) -> None:
        """Raise ValueError for what is not of the form in which this is kept of that weight."""
        own = self.state[name]
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise ValueError(f"{name} is no dense tensor")
        sizes = (weight.shape[size - 2] if size > 1 else size for size in own.shape)
        if value.shape != (wanted := torch.Size(sizes)):
            its = "its weight's shape," if wanted == weight.shape else "the shape"
            raise ValueError(f"{name} has not {its} {list(wanted)}")
        kinds = [(x.is_floating_point(), x.is_complex()) for x in (value, own)]
        if kinds[0] != kinds[1] or value.itemsize < 2:
            raise ValueError(f"{name} is of {value.dtype}")
        if name == "step" and not 0 <= float(value) < math.inf:
            raise ValueError(f"an optimizer's step is {float(value)}, and should be >= 0")

    def differs(self, there: Collection[str]) -> str:
        """What is kept, and what is there instead."""
        kept, is_there = _listed(self.state), _listed(there)
        return f"{self.cls.__name__} as it is set keeps {kept} of a weight, and {is_there} is there"

    def _updated(
        self, options: Mapping[str, Any], state: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """What is kept after an update under these options, which went on from that state."""
        made: Any = self.cls  # whose constructors need no more than weights
        optimizer = made([self.weight])
        more = {name: _number(value) for name, value in {**self.group, **options}.items()}
        optimizer.param_groups[0].update({**more, **PLAIN, "params": [self.weight], "lr": 1e-3})
        if state is not None:
            optimizer.state[self.weight] = state
        self.weight.grad = torch.ones_like(self.weight)
        with torch.no_grad():
            inspect.unwrap(self.cls.step)(optimizer)
        kept = optimizer.state.get(self.weight, {})
        return {name: value for name, value in kept.items() if value is not None}


def _weights(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    return ((group, weight) for group in optimizer.param_groups for weight in group["params"])


def _on(value: Any) -> Any:
    """That option, switched on."""
    if value is False:
        return True
    return 0.5 if type(value) in (int, float) and value == 0 else value


def _number(value: Any) -> Any:
    """Without tensors, which may lie on another device."""
    if isinstance(value, tuple):
        return tuple(_number(item) for item in value)
    return float(value) if isinstance(value, Tensor) else value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"
