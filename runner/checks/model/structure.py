"""What a model is made of: whose code and hooks it runs, and what it hides from torch.

A tripwire: harm done in a trusted module is not seen. `__module__` can be set to anything, so a
class counts as a module's own only if that module has it under its name, and a function only if
the module's names are the ones it looks its own up in.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from runner.checks.model.report import make_reason
from runner.checks.model.weights import NamedTensor
from runner.security.registry import inside
from runner.security.trust import Reason, Severity

Modules = Sequence[tuple[str, nn.Module]]

OWN_PACKAGES = ("torch", "runner")
NOWHERE = "no module"
MAX_DEPTH = 6  # wrappers around wrappers
MODULE_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
GLOBAL_HOOKS = (
    *("_global_forward_pre_hooks", "_global_forward_hooks"),
    *("_global_backward_pre_hooks", "_global_backward_hooks"),
    *("_global_parameter_registration_hooks", "_global_module_registration_hooks"),
    "_global_buffer_registration_hooks",
)
LARGE_BUFFER = 16 * 2**20  # bytes, and larger than all parameters


def check_structure(
    model: nn.Module, tensors: Sequence[NamedTensor], trusted: Sequence[str], foreign: Severity
) -> Iterator[Reason]:
    """What is unusual; `foreign` is the severity of classes of packages that are not trusted."""
    modules = list(model.named_modules())
    yield from _check_classes(modules, trusted, foreign)
    yield from _check_methods(modules, trusted)
    yield from _check_hooks(modules, tensors, trusted)
    yield from _check_attributes(modules, tensors)
    learned = sum(one.bytes for one in tensors if one.is_parameter)
    for one in tensors:
        if not one.is_parameter and one.bytes > max(LARGE_BUFFER, learned):
            evidence = f"{one.bytes / 2**20:,.0f} MiB, more than all parameters together"
            yield make_reason("buffers.huge", Severity.WARNING, one.name, evidence)
    yield from _check_dtypes(modules, tensors)


# -- whose code ------------------------------------------------------------------------------------


def is_known(module: str, trusted: Sequence[str]) -> bool:
    """Whether it is torch's, the runner's, or lies in a package that is trusted."""
    return any(inside(module, package) for package in (*OWN_PACKAGES, *trusted))


def home_of_class(kind: type) -> str:
    """The module that has the class; one made while running is judged by its functions or bases."""
    name = kind.__module__
    found: Any = sys.modules.get(name)
    for part in kind.__qualname__.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if found is kind:
        return name
    own = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    homes = {_home_of_function(f) for f in own} or {home_of_class(base) for base in kind.__bases__}
    strange = sorted(
        home for home in homes if not is_known(home, (name.partition(".")[0], "builtins"))
    )
    return strange[0] if strange else name


def _home_of_function(function: FunctionType) -> str:
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    return name if module is not None and vars(module) is function.__globals__ else NOWHERE


def _homes(code: Any, own: Collection[int], depth: int = 0) -> Iterator[str]:
    """The modules that a callable's code is of, inside wrappers, partials and closures too.

    Functions in `own`, by id, are left out with all that is inside them.
    """
    if depth > MAX_DEPTH or id(code) in own:
        return
    parts: list[Any] = []
    if isinstance(code, partial):
        parts = [code.func, *filter(callable, (*code.args, *code.keywords.values()))]
    elif isinstance(code, MethodType):
        parts = [code.__func__]
    elif isinstance(code, FunctionType):
        yield _home_of_function(code)
        cells = [vars(code).get("__wrapped__"), *map(_cell_content, code.__closure__ or ())]
        parts = [part for part in cells if isinstance(part, FunctionType | MethodType | partial)]
    elif type(code).__name__ == "_WrappedHook":  # torch's own
        parts = [code.hook]
    elif isinstance(code, BuiltinFunctionType):
        yield code.__module__ or "builtins"
    else:
        yield home_of_class(code if isinstance(code, type) else type(code))
    for part in parts:
        yield from _homes(part, own, depth + 1)


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _stranger(code: Any, trusted: Sequence[str], own: Collection[int] = frozenset()) -> str:
    """The first module that code comes from and that is not known, or nothing."""
    return next((home for home in _homes(code, own) if not is_known(home, trusted)), "")


def _check_classes(modules: Modules, trusted: Sequence[str], foreign: Severity) -> Iterator[Reason]:
    """Each class of a package that is not trusted, with how often and where it is first."""
    counts = Counter(type(module) for _, module in modules)
    first = {type(module): path or "(the model)" for path, module in reversed(modules)}
    for kind, count in counts.items():
        home = home_of_class(kind)
        if not is_known(home, trusted):
            times = "" if count == 1 else f", {count:,} of them"
            says = "" if home == kind.__module__ else f", though it says {kind.__module__}"
            evidence = f"{kind.__qualname__} is of {home}{says}{times}"
            level = Severity.WARNING if says else foreign
            yield make_reason("structure.foreign_class", level, first[kind], evidence)
            continue
        owner = next((o for o in kind.__mro__ if "forward" in vars(o)), None)
        # who decorates a class of their own is no concern of ours
        if owner is None or not is_known(home_of_class(owner), ()):
            continue
        forward = vars(owner)["forward"]
        if isinstance(forward, FunctionType) and (home := _stranger(forward, trusted)):
            evidence = f"{owner.__qualname__}.forward was replaced by code of {home}"
            yield make_reason("structure.patched_class", Severity.WARNING, first[kind], evidence)


def _check_methods(modules: Modules, trusted: Sequence[str]) -> Iterator[Reason]:
    """Methods that one instance has another of than its class, such as `forward`."""
    for path, module in modules:
        kind = type(module)
        own = {id(f) for owner in kind.__mro__ for f in vars(owner).values() if callable(f)}
        for name, value in vars(module).items():
            if callable(value) and callable(getattr(kind, name, None)):
                if home := _stranger(value, trusted, own):
                    where = f"{path}.{name}".lstrip(".")
                    evidence = f"replaced in this {kind.__qualname__} alone, by code of {home}"
                    yield make_reason("structure.patched_method", Severity.WARNING, where, evidence)


def _check_hooks(
    modules: Modules, tensors: Sequence[NamedTensor], trusted: Sequence[str]
) -> Iterator[Reason]:
    """Code that runs along with the model and is not torch's, ours or of a trusted package."""
    holders: list[tuple[str, Any, Sequence[str]]] = [
        *((path or "(the model)", module, MODULE_HOOKS) for path, module in modules),
        *((one.name, one.original, TENSOR_HOOKS) for one in tensors),
        ("(every module)", torch_module, GLOBAL_HOOKS),
    ]
    for where, holder, kinds in holders:
        for kind in kinds:
            for hook in list((getattr(holder, kind, None) or {}).values()):
                if home := _stranger(hook, trusted):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    what = kind.strip("_").removesuffix("s").replace("_", " ")
                    evidence = f"{what} {name} of {home}"
                    yield make_reason("hooks.unexpected", Severity.WARNING, where, evidence)


# -- what torch does not know of -------------------------------------------------------------------


def _check_attributes(modules: Modules, tensors: Sequence[NamedTensor]) -> Iterator[Reason]:
    """Tensors and layers in plain attributes and lists."""
    registered = {id(module) for _, module in modules} | {id(one.original) for one in tensors}
    device = next((one.tensor.device for one in tensors if one.is_parameter), None)
    for path, module in modules:
        for name, value in _plain_attributes(module):
            where = f"{path}.{name}".lstrip(".")
            if id(value) in registered:
                continue
            if isinstance(value, Tensor):
                learns = value.requires_grad and value.is_leaf
                apart = device is not None and value.device != device
                level = Severity.WARNING if learns or apart else Severity.NOTE
                evidence = f"{list(value.shape)} on {value.device} that is neither saved nor moved"
                evidence += ", and never trained" if learns else ""
                yield make_reason("buffers.unregistered", level, where, evidence)
            elif next(value.parameters(), None) is not None:
                kind = type(value).__qualname__
                evidence = f"a {kind} that is neither saved, moved nor trained"
                yield make_reason(
                    "structure.unregistered_module", Severity.WARNING, where, evidence
                )


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors and modules by plain names, and one level down in lists, tuples and dicts."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        items: Any = [(name, value)]
        if isinstance(value, dict):
            items = ((f"{name}.{key}", item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            items = ((f"{name}.{i}", item) for i, item in enumerate(value))
        yield from (pair for pair in items if isinstance(pair[1], Tensor | nn.Module))


def _check_dtypes(modules: Modules, tensors: Sequence[NamedTensor]) -> Iterator[Reason]:
    """Types that do not go together in a model, or in the product of one layer."""
    dtypes: dict[torch.dtype, list[str]] = {}
    by_owner: dict[int, set[torch.dtype]] = {}
    for one in tensors:
        dtype = one.tensor.dtype
        if one.is_parameter and dtype.is_floating_point and dtype.itemsize > 1:
            dtypes.setdefault(dtype, []).append(one.name)
            by_owner.setdefault(id(one.owner), set()).add(dtype)
    double = dtypes.get(torch.float64, [])
    if double and len(dtypes) > 1:
        evidence = f"{len(double):,} parameters are float64 and others are not"
        yield make_reason("dtype.float64", Severity.WARNING, double[0], evidence)
    halves = [dtypes[kind] for kind in (torch.float16, torch.bfloat16) if kind in dtypes]
    if len(halves) > 1:
        evidence = "float16 and bfloat16 in one model, whose ranges differ"
        yield make_reason("dtype.mixed", Severity.WARNING, min(halves, key=len)[0], evidence)
    products = nn.Linear | nn.modules.conv._ConvNd | nn.Bilinear | nn.RNNBase
    for path, module in modules:
        kinds = by_owner.get(id(module), set())
        if len(kinds) > 1 and torch.float64 not in kinds and isinstance(module, products):
            evidence = f"{' and '.join(sorted(map(str, kinds)))} in one layer"
            where = path or "(the model)"
            yield make_reason("dtype.mixed", Severity.WARNING, where, evidence)
