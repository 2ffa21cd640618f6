"""A Hydra-configured experiment runner for PyTorch.

>>> from runner import build, compose, train
>>> with build(compose(["data=cancer"])) as run:
...     print(train(run).metrics)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.build import build
    from runner.config import RunConfig, compose
    from runner.loop import evaluate, train
    from runner.run import Evidence, Hook, Technique, Verdict
    from runner.summary import Summary

__version__ = "0.1.0"

__all__ = [
    "Evidence", "Hook", "RunConfig", "Summary", "Technique", "Verdict", "__version__", "build",
    "compose", "evaluate", "train",
]  # fmt: skip

_HOMES = {
    "Evidence": "runner.run",
    "Hook": "runner.run",
    "RunConfig": "runner.config",
    "Summary": "runner.summary",
    "Technique": "runner.run",
    "Verdict": "runner.run",
    "compose": "runner.config",
    "evaluate": "runner.loop",
    "train": "runner.loop",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import runner` alone brings no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


class _Package(ModuleType):
    """`runner.build` is a module too, and importing it would put it where the function is meant."""

    @property
    def build(self) -> Any:
        return import_module("runner.build").build

    @build.setter
    def build(self, module: ModuleType) -> None:
        """What the import system binds is left to `sys.modules`."""


sys.modules[__name__].__class__ = _Package
