"""Whether an optimizer's update runs torch's code only, or also the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
# their hooks keep the state complete for callers of step()
OUR_HOOK_MODULES = {"runner.core.optim.user_optimizer"}


def is_torch_class(cls: type[Optimizer]) -> bool:
    """Whether `cls` is a class of torch.optim itself, with an unpatched step()."""
    methods = (cls.step, getattr(cls, "_init_group", cls.step))
    return cls is getattr(torch.optim, cls.__name__, None) and all(map(_is_torch_code, methods))


def uses_torch_step(optimizer: Optimizer) -> bool:
    """Whether only torch's code makes an update: no subclass, no patch, no hook on step().

    Only then may a kernel replace step(), or step() run for an update that is reverted: a user's
    code may change weights, or Python state that no copy restores.
    """
    cls = type(optimizer)
    if cls is not getattr(torch.optim, cls.__name__, None) or not _is_torch_code(optimizer.step):
        return False
    registries: list[Any] = [
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    ]
    hooks = [hook for registry in registries if registry for hook in registry.values()]
    modules = {getattr(hook, "__module__", "") for hook in hooks}
    return modules <= OUR_HOOK_MODULES


def _is_torch_code(function: Any) -> bool:
    """Whether the function and all that it wraps are defined in torch's package."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(TORCH_FOLDER):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@contextmanager
def skip_compiler_import() -> Iterator[None]:
    """Avoid the import of torch's compiler (a second, once) in an optimizer's first calls.

    torch imports it to exclude these calls from compilation; before the import nothing is compiled.
    """
    with ExitStack() as stack:
        for name in ("add_param_group", "state_dict", "load_state_dict"):
            inner: Any = getattr(getattr(Optimizer, name), "__wrapped__", None)
            if inner is not None and "torch._dynamo" not in sys.modules:
                inner.__dynamo_disable = inner  # where torch caches the compiler's wrapper
                stack.callback(vars(inner).pop, "__dynamo_disable", None)
        yield
