"""What a model is made of: whose code, hooks, types, buffers, and what it hides from torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as shared
from torch.nn.utils.parametrize import ParametrizationList

from runner.checks.model import origin
from runner.checks.model.inventory import Held
from runner.security.trust import Reason, Severity

HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
GLOBAL = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks",
    "_global_backward_hooks", "_global_parameter_registration_hooks",
    "_global_module_registration_hooks", "_global_buffer_registration_hooks",
)  # fmt: skip
BUFFER = 16 * 2**20  # bytes above which a buffer is large, if it is larger than all parameters
HALVES = {torch.float16, torch.bfloat16}
TENSOR = frozenset(dir(Tensor))
REMOVE = "remove it, or name its package in security.trusted if it is meant to be there"


def structure(
    model: nn.Module, tensors: Sequence[Held], trusted: Sequence[str], foreign: Severity
) -> Iterator[Reason]:
    """Whatever is unusual; `foreign` is how bad classes of packages are that are not trusted."""
    modules = list(model.named_modules())
    yield from _classes(modules, trusted, foreign)
    yield from _patched(modules, trusted)
    yield from _hooks(modules, tensors, trusted)
    yield from _hidden(modules, tensors)
    yield from _buffers(modules, tensors)
    yield from _types(modules, tensors)


# -- whose code -----------------------------------------------------------------------------------


def _classes(
    modules: Sequence[tuple[str, nn.Module]], trusted: Sequence[str], foreign: Severity
) -> Iterator[Reason]:
    """Each class of a package that nobody has named, with how often and where it is first."""
    counts = Counter(type(module) for _, module in modules)
    first = {type(module): path for path, module in reversed(modules)}
    within = {
        id(one): path for path, m in modules if isinstance(m, ParametrizationList) for one in m
    }
    for kind, count in counts.items():
        home = origin.of_class(kind)
        if not origin.known(home, trusted):
            path = first[kind]
            times = "" if count == 1 else f", {count:,} of them"
            says = "" if home == kind.__module__ else f", though it says {kind.__module__}"
            parametrizes = any(id(m) in within for _, m in modules if type(m) is kind)
            yield Reason(
                "hooks.parametrization" if parametrizes else "structure.foreign_class",
                Severity.WARNING if parametrizes or says else foreign, path or "(the model)",
                f"{kind.__qualname__} is of {home}{says}{times}",
                "trust its package if you know it",
            )  # fmt: skip
            continue
        forward = _class_forward(kind)
        if forward is None:
            continue
        owner, function = forward
        if not origin.known(origin.of_class(owner), ()):
            continue  # who decorates a class of one's own is no concern of ours
        for odd in _strangers(function, trusted):
            yield Reason(
                "structure.patched_class", Severity.WARNING, first[kind] or "(the model)",
                f"{owner.__qualname__}.forward was replaced by code of {odd}", REMOVE,
            )  # fmt: skip


def _class_forward(kind: type) -> tuple[type, Any] | None:
    for owner in kind.__mro__:
        if "forward" in vars(owner):
            function = vars(owner)["forward"]
            return (owner, function) if isinstance(function, FunctionType) else None
    return None


def _strangers(
    code: Any, trusted: Sequence[str], own: Collection[int] = frozenset()
) -> Iterator[str]:
    """The first module that code comes from and that is not known; `own` are left out, by id."""
    yield from [home for home in origin.homes(code, own) if not origin.known(home, trusted)][:1]


def _patched(modules: Sequence[tuple[str, nn.Module]], trusted: Sequence[str]) -> Iterator[Reason]:
    """Methods that one instance has another of than its class, such as `forward`."""
    for path, module in modules:
        for name, value in vars(module).items():
            if not callable(value) or not callable(getattr(type(module), name, None)):
                continue
            for odd in _strangers(value, trusted, _functions_of(type(module))):
                yield Reason(
                    "structure.patched_method", Severity.WARNING, f"{path}.{name}".lstrip("."),
                    f"replaced in this {type(module).__qualname__} alone, by code of {odd}", REMOVE,
                )  # fmt: skip


def _functions_of(kind: type) -> set[int]:
    """What its class and bases define: a method it chooses itself, or that a wrapper calls."""
    return {id(f) for owner in kind.__mro__ for f in vars(owner).values() if callable(f)}


# -- hooks ----------------------------------------------------------------------------------------


def _hooks(
    modules: Sequence[tuple[str, nn.Module]], tensors: Sequence[Held], trusted: Sequence[str]
) -> Iterator[Reason]:
    """Code that runs along with the model and is not torch's, ours or of a trusted package."""
    for path, module in modules:
        own = vars(module)
        for kind in HOOKS:
            if hooks := own.get(kind):
                yield from _odd_hooks(hooks, path or "(the model)", kind, trusted)
    for one in tensors:
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(one.original, kind, None):
                yield from _odd_hooks(hooks, one.name, kind, trusted)
    for kind in GLOBAL:
        if hooks := getattr(shared, kind, None):
            yield from _odd_hooks(hooks, "(every module)", kind, trusted)


def _odd_hooks(
    hooks: Mapping[int, Callable[..., Any]], where: str, kind: str, trusted: Sequence[str]
) -> Iterator[Reason]:
    for hook in list(hooks.values()):
        for odd in _strangers(hook, trusted):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            what = kind.strip("_").removesuffix("s").replace("_", " ")
            yield Reason(
                "hooks.unexpected", Severity.WARNING, where, f"{what} {name} of {odd}", REMOVE
            )


# -- what torch does not know of ------------------------------------------------------------------


def _hidden(modules: Sequence[tuple[str, nn.Module]], tensors: Sequence[Held]) -> Iterator[Reason]:
    """Tensors and layers in plain attributes and lists; methods of tensors that were covered."""
    registered = {id(module) for _, module in modules} | {id(one.original) for one in tensors}
    device = next((one.tensor.device for one in tensors if one.is_parameter), None)
    for path, module in modules:
        for name, value in _attributes(module):
            if id(value) in registered:
                continue
            where = f"{path}.{name}".lstrip(".")
            if isinstance(value, nn.Module):
                if next(value.parameters(), None) is not None:
                    yield Reason(
                        "structure.unregistered_module", Severity.WARNING, where,
                        f"a {type(value).__qualname__} that is neither saved, moved nor trained",
                        "hold it in an nn.ModuleList or nn.ModuleDict",
                    )  # fmt: skip
            elif isinstance(value, Tensor):
                learns = value.requires_grad and value.is_leaf
                apart = device is not None and value.device != device
                yield Reason(
                    "buffers.unregistered",
                    Severity.WARNING if learns or apart else Severity.NOTE, where,
                    f"{list(value.shape)} on {value.device} that is neither saved nor moved"
                    + (", and never trained" if learns else ""),
                    "use nn.Parameter or nn.ParameterList" if learns else "use register_buffer",
                )  # fmt: skip
    for one in tensors:
        covered = sorted(TENSOR & set(getattr(one.original, "__dict__", ())))
        if covered:
            yield Reason(
                "structure.covered_method", Severity.REFUSAL, one.name,
                f"its own {', '.join(covered[:3])} hides that of every tensor",
                "such a tensor may say anything of itself: do not use the file it is from",
            )  # fmt: skip


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds by plain names, and one level down in lists, tuples and dicts."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, Tensor | nn.Module):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", x) for key, x in value.items() if _holds(x))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}.{i}", x) for i, x in enumerate(value) if _holds(x))


def _holds(value: Any) -> bool:
    return isinstance(value, Tensor | nn.Module)


# -- buffers and types ----------------------------------------------------------------------------


def _buffers(modules: Sequence[tuple[str, nn.Module]], tensors: Sequence[Held]) -> Iterator[Reason]:
    learned = sum(one.bytes for one in tensors if one.is_parameter)
    for one in tensors:
        if not one.is_parameter and one.bytes > max(BUFFER, learned):
            yield Reason(
                "buffers.huge", Severity.WARNING, one.name,
                f"{one.bytes / 2**20:,.0f} MiB, more than all parameters together "
                f"({learned / 2**20:,.1f} MiB)", "is it data? they do not belong into a model",
            )  # fmt: skip
    for path, module in modules:
        for name in sorted(getattr(module, "_non_persistent_buffers_set", ())):
            yield Reason(
                "buffers.not_persistent", Severity.NOTE, f"{path}.{name}".lstrip("."),
                "is not saved with the model", "fine if its constructor makes it anew",
            )  # fmt: skip


def _types(modules: Sequence[tuple[str, nn.Module]], tensors: Sequence[Held]) -> Iterator[Reason]:
    """Types that do not go together, or that a parameter rarely has."""
    by_type: dict[torch.dtype, list[str]] = {}
    own: dict[int, set[torch.dtype]] = {}
    for one in tensors:
        dtype = one.tensor.dtype
        if one.is_parameter and dtype.is_floating_point and dtype.itemsize > 1:
            by_type.setdefault(dtype, []).append(one.name)
            own.setdefault(id(one.owner), set()).add(dtype)
        elif one.is_parameter and not dtype.is_floating_point and not dtype.is_complex:
            # one that wants a gradient cannot be made: torch raises
            yield Reason(
                "dtype.integer_parameter", Severity.NOTE, one.name,
                f"{_name(dtype)}: no gradient ever reaches it", "use register_buffer",
            )  # fmt: skip
    double = by_type.get(torch.float64, [])
    if double and len(by_type) > 1:
        yield Reason(
            "dtype.float64", Severity.WARNING, double[0],
            f"{len(double):,} parameters are float64 and others are not", "use .float()",
        )  # fmt: skip
    elif double:
        yield Reason(
            "dtype.float64", Severity.NOTE, double[0],
            "all parameters are float64, which is slow on most devices", "use .float()",
        )  # fmt: skip
    for path, module in modules:
        kinds = own.get(id(module), set())
        # their own forward would raise; norms may keep fp32 next to anything
        if len(kinds) > 1 and torch.float64 not in kinds and _multiplies(module):
            yield Reason(
                "dtype.mixed", Severity.WARNING, path or "(the model)",
                f"{' and '.join(sorted(map(_name, kinds)))} in one layer", "use one type there",
            )  # fmt: skip
    if set(by_type) >= HALVES:
        few = min((by_type[dtype] for dtype in HALVES), key=len)
        yield Reason(
            "dtype.mixed", Severity.WARNING, few[0], "float16 and bfloat16 in one model",
            "use one of them: their ranges differ",
        )  # fmt: skip
    elif torch.float32 in by_type and set(by_type) & HALVES:
        few = min(by_type.values(), key=len)
        yield Reason(
            "dtype.mixed", Severity.NOTE, few[0],
            ", ".join(f"{len(names):,} × {_name(dtype)}" for dtype, names in by_type.items()), "",
        )  # fmt: skip


def _multiplies(module: nn.Module) -> bool:
    """Whether its parameters go into one product."""
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.Bilinear | nn.RNNBase)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
