"""Whose code and hooks a model runs.

A tripwire: harm done in a trusted module is not seen, and code may lie about its module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from runner.checks.model.report import make_reason
from runner.checks.model.weights import NamedTensor
from runner.security.registry import inside
from runner.security.trust import Reason, Severity

Modules = Sequence[tuple[str, nn.Module]]

OWN_PACKAGES = ("torch", "runner")
MODULE_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in MODULE_HOOKS[:4])
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_structure(
    model: nn.Module, tensors: Sequence[NamedTensor], trusted: Sequence[str], foreign: Severity
) -> Iterator[Reason]:
    """What is unusual; `foreign` is the severity of classes of packages that are not trusted."""
    modules = list(model.named_modules())
    known = (*OWN_PACKAGES, *trusted)
    yield from _foreign_classes(modules, known, foreign)
    yield from _patched_methods(modules, known)
    yield from _unexpected_hooks(modules, tensors, known)


def _home(code: Any) -> str:
    """The module in which a callable looks its names up, wrappers taken off."""
    while True:
        if isinstance(code, partial):
            code = code.func
        elif isinstance(code, MethodType):
            code = code.__func__
        elif type(code).__name__ == "_WrappedHook":  # torch's own
            code = code.hook
        elif isinstance(code, FunctionType) and "__wrapped__" in vars(code):
            code = vars(code)["__wrapped__"]
        else:
            break
    if isinstance(code, FunctionType):
        return str(code.__globals__.get("__name__", ""))
    if not isinstance(code, type | BuiltinFunctionType):
        code = type(code)
    return code.__module__ or "builtins"


def _is_known(home: str, known: Sequence[str]) -> bool:
    return any(inside(home, package) for package in known)


def _foreign_classes(modules: Modules, known: Sequence[str], foreign: Severity) -> Iterator[Reason]:
    """Each class of a package that is not trusted, with how often and where it is first."""
    counts = Counter(type(module) for _, module in modules)
    first = {type(module): path or "(the model)" for path, module in reversed(modules)}
    for kind, count in counts.items():
        if not _is_known(kind.__module__, known):
            times = "" if count == 1 else f", {count:,} of them"
            evidence = f"{kind.__qualname__} is of {kind.__module__}{times}"
            yield make_reason("structure.foreign_class", foreign, first[kind], evidence)


def _patched_methods(modules: Modules, known: Sequence[str]) -> Iterator[Reason]:
    """A forward of torch's or any method of one instance that was replaced by unknown code."""
    for path, module in modules:
        kind = type(module)
        replaced = {n: v for n, v in vars(module).items() if callable(getattr(kind, n, None))}
        owner = next((o for o in kind.__mro__ if "forward" in vars(o)), nn.Module)
        if _is_known(owner.__module__, OWN_PACKAGES):
            replaced.setdefault("forward", vars(owner)["forward"])
        for name, value in replaced.items():
            home = _home(value)
            if callable(value) and home != kind.__module__ and not _is_known(home, known):
                where, evidence = f"{path}.{name}".lstrip("."), f"replaced by code of {home}"
                yield make_reason("structure.patched_method", Severity.WARNING, where, evidence)


def _unexpected_hooks(
    modules: Modules, tensors: Sequence[NamedTensor], known: Sequence[str]
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
                if not _is_known(home := _home(hook), known):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    what = kind.strip("_").removesuffix("s").replace("_", " ")
                    evidence = f"{what} {name} of {home}"
                    yield make_reason("hooks.unexpected", Severity.WARNING, where, evidence)
