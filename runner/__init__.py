"""A Hydra-configured experiment runner for PyTorch.

>>> from runner import build, compose, train
>>> with build(compose(["data=cancer"])) as run:
...     print(train(run).metrics)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # under -m, a `typing.py` in the current folder would be imported
if TYPE_CHECKING:
    from typing import Any

    from runner.build import build
    from runner.checks.outputs import sanitise
    from runner.composing import compose
    from runner.config import RunConfig
    from runner.library.benchmark import benchmark_optimizations, show_comparison
    from runner.library.debugging import debug_operation, debugger, profile
    from runner.library.guarded_optimizer import train_step
    from runner.library.inference import check_model, safe_inference
    from runner.library.memory import Memory, system_info
    from runner.library.optimize import optimize, optimize_model, optimize_training_loop
    from runner.library.pipeline import create_training_pipeline
    from runner.library.profile import profile_model
    from runner.library.stability import Stability
    from runner.library.trained import Trained, load
    from runner.techniques.base import Evidence, Technique
    from runner.training.evaluation import evaluate
    from runner.training.hook import Hook, Verdict
    from runner.training.loop import train
    from runner.training.summary import Summary

__version__ = "0.1.0"

__all__ = [
    "Evidence", "Hook", "Memory", "RunConfig", "Stability", "Summary", "Technique", "Trained",
    "Verdict", "__version__", "benchmark_optimizations", "build", "check_model", "compose",
    "create_training_pipeline", "debug_operation", "debugger", "evaluate", "load", "optimize",
    "optimize_model", "optimize_training_loop", "profile", "profile_model", "safe_inference",
    "sanitise", "show_comparison", "system_info", "train", "train_step",
]  # fmt: skip

_MODULE_BY_NAME = {
    "Evidence": "runner.techniques.base",
    "Hook": "runner.training.hook",
    "Memory": "runner.library.memory",
    "RunConfig": "runner.config",
    "Stability": "runner.library.stability",
    "Summary": "runner.training.summary",
    "Technique": "runner.techniques.base",
    "Trained": "runner.library.trained",
    "Verdict": "runner.training.hook",
    "benchmark_optimizations": "runner.library.benchmark",
    "check_model": "runner.library.inference",
    "compose": "runner.composing",
    "create_training_pipeline": "runner.library.pipeline",
    "debug_operation": "runner.library.debugging",
    "debugger": "runner.library.debugging",
    "evaluate": "runner.training.evaluation",
    "load": "runner.library.trained",
    "optimize": "runner.library.optimize",
    "optimize_model": "runner.library.optimize",
    "optimize_training_loop": "runner.library.optimize",
    "profile": "runner.library.debugging",
    "profile_model": "runner.library.profile",
    "safe_inference": "runner.library.inference",
    "sanitise": "runner.checks.outputs",
    "show_comparison": "runner.library.benchmark",
    "system_info": "runner.library.memory",
    "train": "runner.training.loop",
    "train_step": "runner.library.guarded_optimizer",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access: `import runner` alone imports no torch."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)


class _Package(ModuleType):
    """Keeps `runner.build` the function: importing the module of that name would replace it."""

    @property
    def build(self) -> Any:
        return import_module("runner.build").build

    @build.setter
    def build(self, module: ModuleType) -> None:
        """Ignore the module that the import system binds; it is in `sys.modules`."""


sys.modules[__name__].__class__ = _Package
