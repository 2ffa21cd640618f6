"""The same table of names for a Hydra that asks for one (1.4 and later)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from runner.security.intent import registry
from runner.security.intent.names import installed
from runner.security.targets import EVERYTHING

ARGUMENT = "execution_whitelist"


def asked_for(main: Callable[..., Any], trusted: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What to hand to `hydra.main`: nothing, where it knows of no such list."""
    if ARGUMENT not in inspect.signature(main).parameters:
        return {}
    if EVERYTHING in trusted:
        return {ARGUMENT: (EVERYTHING,)}
    names = registry.CALLBACKS | registry.LOGGING | registry.SAMPLERS | installed()
    packages = {name for package in trusted for name in (package, f"{package}.*")}
    return {ARGUMENT: tuple(sorted(registry.OURS | registry.torch_names() | names | packages))}
