"""Comparison of the implementations of an update with torch's default, on copies of the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import zip_longest
from math import inf, isfinite
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core.optim.optimizer import (
    Optimizer,
    fill_momentum,
    group_lr_shares,
    skip_compiler_import,
    sparse_embeddings,
    uses_torch_step,
)
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.stability import StabilityConfig

KEY = "optimizer.implementation"
MAX_TENSORS, MAX_VALUES = 64, 1 << 15  # compared, in all: a few milliseconds
MAX_PART = 65_536  # values of a large tensor
PER_KIND = 3  # tensors of the same dtype, layout and group options: largest, smallest, median
STEPS, RATE = 2, 0.1
TOLERANCE = 4  # times eps of a tensor's dtype, as share of its norm
NORM_TOLERANCE = 8  # more with clipping, times eps of fp32 at most: the total norm is rounded
NO_SETTINGS = ("params", "param_names", "lr", "initial_lr")  # of a group; same arithmetic


class Implementation(NamedTuple):
    """How updates are computed."""

    options: dict[str, Any]  # that are set on the optimizer
    shortcuts: bool = True  # False: only by step(), after the host has read a flag


class UpdateResult(NamedTuple):
    """Weights and state by name, and their norms."""

    values: dict[str, Tensor]
    norms: list[float]


class UpdateComparison:
    """Two updates of copied weights by torch's default, clipped and not, to compare others with.

    Gradients are random, as large as the weights, and clipped at half of their norm. At most 64
    parts of tensors are copied, so that a large model does not take longer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        options: dict[str, Any],  # that we choose; its owner's are part of the default
        model: nn.Module,
        seed: int = 0,
        *,
        sets_rate: bool = False,  # by a schedule, not by the optimizer's owner
        scheduled: bool = False,  # the rate is read from a table on the device
    ) -> None:
        self.optimizer, self.options, self.seed = optimizer, options, seed
        self.rate, self.scheduled = RATE if sets_rate else None, scheduled
        self.shares = group_lr_shares(optimizer, self.rate)
        # else the user's step() runs, or one for sparse gradients, and nothing is chosen
        self.compares = uses_torch_step(optimizer) and not sparse_embeddings(model)
        foreach = {"foreach": True}
        if "capturable" in self.accepted and self.optimizer.param_groups[0]["params"][0].is_cuda:
            foreach["capturable"] = True
        self.candidates = {
            next(iter(options), "default"): Implementation(options),
            **({"foreach": Implementation(foreach)} if "fused" in options else {}),
            "default": Implementation({}),
            "plain": Implementation({}, shortcuts=False),
        }

    def select(self, recorded: str | None = None) -> tuple[str, str]:
        """Return the candidate with torch's updates, or the `recorded` one, and why no other."""
        if recorded in self.candidates:
            return str(recorded), "kept from the resumed run"
        reasons: list[str] = []
        for name, candidate in self.candidates.items():
            if not (reason := self.difference(candidate)):
                break
            reasons.append(f"{name}: {reason}")
        return name, "; ".join(reasons)

    def difference(self, implementation: Implementation, whole_step: bool = False) -> str:
        """Return where it differs from torch's default, or ""; `whole_step`: as in that graph."""
        options, shortcuts = implementation
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        on_host = self.optimizer.param_groups[0]["params"][0].device.type == "cpu"
        is_default = not options and (not shortcuts or (on_host and not is_fused))
        if is_default or not self.compares or not self.samples:
            return ""
        if "foreach" in options and (reason := _imprecise_state(self.expected[False][0].values)):
            return reason
        for clipped in (False, True):
            update = self._update(implementation)
            if whole_step:
                update.schedule_on_device()
            for count, result in enumerate(self._updates(update, clipped, whole_step)):
                if reason := _first_difference(result, self.expected[clipped][count], clipped):
                    return f"{reason} after update {count + 1}{', with clipping' * clipped}"
        return ""

    @cached_property
    def accepted(self) -> Mapping[str, inspect.Parameter]:
        """The constructor's parameters."""
        return inspect.signature(type(self.optimizer)).parameters

    @cached_property
    def samples(self) -> list[tuple[int, Tensor]]:
        """Copies of weights, each with the number of its parameter group."""
        kinds: dict[Any, list[tuple[int, Tensor]]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            settings = repr([(k, v) for k, v in group.items() if k not in NO_SETTINGS])
            for p in group["params"]:
                if p.numel() and p.device.type != "meta":
                    kinds.setdefault((settings, *_layout(p)), []).append((number, p))
        picked = zip_longest(*map(_pick, kinds.values()))
        weights = [one for turn in picked for one in turn if one is not None][:MAX_TENSORS]
        limit = min(MAX_PART, MAX_VALUES // max(1, len(weights)))
        weights.sort(key=lambda one: one[0])  # as the optimizer has them
        return [(number, _copy(_part(p.detach(), limit))) for number, p in weights]

    @cached_property
    def gradients(self) -> list[list[Tensor]]:
        """The gradients of each step: random, as large as each weight."""
        copies = [copy for _, copy in self.samples]
        sizes = [n / copy.numel() ** 0.5 for n, copy in zip(_norms(copies), copies, strict=True)]
        others = sorted(size for size in sizes if size)
        typical = others[len(others) // 2] if others else 1.0
        generator = torch.Generator(copies[0].device).manual_seed(self.seed)
        pairs = [(copy, size or typical) for copy, size in zip(copies, sizes, strict=True)]
        return [
            [_copy(copy).normal_(generator=generator).mul_(size) for copy, size in pairs]
            for _ in range(STEPS)
        ]

    @cached_property
    def norms(self) -> list[float]:
        """The total norm of each step's gradients."""
        return [sum(n * n for n in _norms(gradients)) ** 0.5 for gradients in self.gradients]

    @cached_property
    def expected(self) -> dict[bool, list[UpdateResult]]:
        """Weights and state after each step of torch's default, by whether it is clipped."""
        results: dict[bool, list[UpdateResult]] = {}
        for clipped in (False, True):
            optimizer, parameters = self._copy_optimizer({})
            results[clipped] = []
            for gradients in self.gradients:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = _copy(gradient).mul_(0.5 if clipped else 1.0)
                with torch.no_grad():
                    optimizer.step()
                copies = {name: _copy(v) for name, v in _values(optimizer, parameters).items()}
                results[clipped].append(UpdateResult(copies, _norms([*copies.values()])))
        return results

    def _updates(
        self, update: OptimizerStep, clipped: bool, whole_step: bool
    ) -> Iterator[dict[str, Tensor]]:
        loss = torch.zeros((), dtype=torch.float32, device=update.device)
        for drawn, norm in zip(self.gradients, self.norms, strict=True):
            gradients = [_copy(gradient) for gradient in drawn]
            update.clip_norm = norm / 2 if clipped else None
            with torch.no_grad():
                if whole_step:
                    from runner.core.optim.whole_step import update_weights

                    if (kernel := update.kernel) is not None:
                        update_weights(update, kernel, gradients, loss, update.zero)
                else:
                    for parameter, gradient in zip(update.parameters, gradients, strict=True):
                        parameter.grad = gradient
                    update.apply(*update.measure(loss))
            if update.kernel is not None:
                update.kernel.write_counter()
            yield _values(update.optimizer, update.parameters)

    def _update(self, implementation: Implementation) -> OptimizerStep:
        options, shortcuts = implementation
        rate = self.rate  # of all groups; each takes its `lr_share` of it
        optimizer, parameters = self._copy_optimizer({**options, "lr": rate} if rate else options)
        fill_momentum(optimizer)
        factors = [1.0, 1.0 if not self.scheduled else 0.5]
        module, config = nn.ParameterList(parameters), StabilityConfig()
        update = OptimizerStep(module, optimizer, config, rate, factors, shortcuts=shortcuts)
        update.factors = [1.0]  # the rate of every step, read as it will be in the run
        update._set_schedule()
        return update

    def _copy_optimizer(self, options: Mapping[str, Any]) -> tuple[Optimizer, list[Tensor]]:
        """Return an optimizer of copies, with torch's default implementation but for `options`."""
        kind, groups = type(self.optimizer), self.optimizer.param_groups
        defaults = {name: self.accepted[name].default for name in self.options}
        by_group: dict[int, list[Tensor]] = {}
        for number, copy in self.samples:
            by_group.setdefault(number, []).append(nn.Parameter(_copy(copy)))
        copies = [
            {
                **{k: v for k, v in groups[number].items() if k not in NO_SETTINGS},
                "lr": self._rate(number),
                "lr_share": self.shares[number],
                **defaults,
                **options,
                "params": parameters,
            }
            for number, parameters in by_group.items()
        ]
        with skip_compiler_import():
            optimizer = kind(copies, lr=RATE)  # type: ignore[call-arg]
        # its wrapper imports the compiler
        step: Callable[..., Any] = MethodType(inspect.unwrap(kind.step), optimizer)
        optimizer.step = step  # type: ignore[method-assign]
        return optimizer, [p for group in optimizer.param_groups for p in group["params"]]

    def _rate(self, number: int) -> float | Tensor:
        lr = self.optimizer.param_groups[number]["lr"]
        is_owned = self.rate is None and isinstance(lr, Tensor)
        return torch.full_like(lr, RATE) if is_owned else RATE * self.shares[number]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return dtype, device, and the order of dimensions in memory."""
    order: list[int] = []
    if not tensor.is_contiguous():
        order = [*sorted(range(tensor.ndim), key=tensor.stride), _extent(tensor) > tensor.numel()]
    return tensor.dtype, tensor.device, tensor.ndim, str(order)


def _extent(tensor: Tensor) -> int:
    """Return how many values of memory the tensor spans."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _pick(weights: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Return the largest, the smallest and the median of weights of one kind."""
    by_size = sorted(weights, key=lambda one: -one[1].numel())
    return [by_size[n] for n in dict.fromkeys((0, len(by_size) - 1, len(by_size) // 2))][:PER_KIND]


def _part(tensor: Tensor, limit: int) -> Tensor:
    """Return a part with at most `limit` values and the same number of dimensions."""
    for dim in sorted(range(tensor.ndim), key=tensor.stride, reverse=True):  # it stays dense
        rows = limit // max(1, tensor.numel() // tensor.shape[dim])
        tensor = tensor.narrow(dim, 0, max(1, min(tensor.shape[dim], rows)))
    return tensor


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, unless these would take much memory."""
    if tensor.is_contiguous() or _extent(tensor) > 4 * tensor.numel():
        return tensor.clone()
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _values(optimizer: Optimizer, parameters: list[Tensor]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for number, parameter in enumerate(parameters):
        kind = f"of {str(parameter.dtype).removeprefix('torch.')} weight {number}"
        values[f"value {kind}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                values[f"{key} {kind}"] = value.to(parameter.device)
    return values


def _imprecise_state(values: dict[str, Tensor]) -> str:
    """Return which float32 state of a float64 weight implementations round differently, or ""."""
    # a rate of 0.1 need not show it: ASGD's `eta` is off by 3e-8 at others
    for name, value in values.items():
        exact = name.startswith("step ")  # a counter
        if "of float64 weight" in name and value.dtype is torch.float32 and not exact:
            return f"{name} is only float32, and rounded differently"
    return ""


def _norms(tensors: list[Tensor]) -> list[float]:
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    dtype = torch.float32 if real[0].device.type == "mps" else torch.float64
    real = [t if t.is_floating_point() else t.to(dtype) for t in real]
    # host sync: while the run is built
    return list(torch.stack(torch._foreach_norm(real, 2, dtype=dtype)).tolist())


def _first_difference(actual: dict[str, Tensor], snapshot: UpdateResult, clipped: bool) -> str:
    """Return which of the expected tensors differs from the actual one, or ""."""
    expected, norms = snapshot
    for name, tensor in expected.items():
        if name not in actual or actual[name].shape != tensor.shape:
            return f"{name} is missing"
    differences = torch._foreach_sub([actual[name] for name in expected], [*expected.values()])
    rows = zip(expected.items(), norms, _norms(list(differences)), strict=True)
    for (name, tensor), norm, difference in rows:
        if not isfinite(norm):
            return f"{name} is not finite with torch's default"
        is_float = tensor.is_floating_point() or tensor.is_complex()
        eps = torch.finfo(tensor.dtype).eps if is_float else 0.0
        limit = TOLERANCE * eps + NORM_TOLERANCE * clipped * min(eps, 2.0**-23)  # eps of fp32
        if not difference <= limit * norm:
            share = difference / norm if norm else inf
            return f"{name} differs from torch's default by {share:.2g} of its norm"
    return ""
