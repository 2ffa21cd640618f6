"""Which module some code belongs to: a tripwire, since harm done in a trusted module is not seen.

`__module__` can be set to anything, so a class counts as the module's own only if that module has
it under its name, and a function only if the module's names are what it looks its own up in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from runner.security.targets import inside

OURS = ("torch", "runner")
NOWHERE = "no module"
DEEPEST = 6  # wrappers around wrappers


def known(module: str, trusted: Sequence[str]) -> bool:
    """Whether it is torch's, the runner's, or lies in a package that is trusted."""
    return any(inside(module, package) for package in (*OURS, *trusted))


def of_class(kind: type) -> str:
    """The module that has it; NOWHERE where it only says so.

    One that was put together while running, as torch does for parametrized and sharded layers, is
    judged by its own functions, and by its bases where it has none; what these have of torch or
    of us makes it neither.
    """
    name = kind.__module__
    found: Any = sys.modules.get(name)
    for part in kind.__qualname__.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if found is kind:
        return name
    functions = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    homes = {of_function(f) for f in functions} or {of_class(base) for base in kind.__bases__}
    more = (name.partition(".")[0], "builtins")
    odd = sorted(home for home in homes if not known(home, more))
    return odd[0] if odd else name


def of_function(function: FunctionType) -> str:
    """The module whose names it sees."""
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    return name if module is not None and vars(module) is function.__globals__ else NOWHERE


def functions(code: Any, own: Collection[int] = frozenset(), depth: int = 0) -> Iterator[Any]:
    """The functions that a callable comes to: those inside wrappers, partials and closures too.

    Those in `own`, by id, are left out with all that is inside them.
    """
    if depth > DEEPEST or id(code) in own:
        return
    if isinstance(code, partial):
        for part in (code.func, *code.args, *code.keywords.values()):
            if callable(part):
                yield from functions(part, own, depth + 1)
    elif isinstance(code, MethodType):
        yield from functions(code.__func__, own, depth + 1)
    elif isinstance(code, FunctionType):
        yield code
        inner = [vars(code).get("__wrapped__"), *(_held(cell) for cell in code.__closure__ or ())]
        for part in inner:
            if isinstance(part, FunctionType | MethodType | partial):
                yield from functions(part, own, depth + 1)
    elif type(code).__name__ == "_WrappedHook" and of_class(type(code)).startswith("torch."):
        yield from functions(code.hook, own, depth + 1)
    else:
        yield code


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def homes(code: Callable[..., Any], own: Collection[int] = frozenset()) -> Iterator[str]:
    """The modules that a callable's code comes from; functions in `own` are left out, by id."""
    for one in functions(code, own):
        if isinstance(one, FunctionType):
            yield of_function(one)
        elif isinstance(one, BuiltinFunctionType):
            yield one.__module__ or "builtins"
        else:
            yield of_class(one if isinstance(one, type) else type(one))
