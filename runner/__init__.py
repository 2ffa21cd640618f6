"""A Hydra-configured experiment runner for PyTorch.

>>> from runner import build, compose, train
>>> with build(compose(["data=cancer"])) as run:
...     print(train(run).metrics)
"""

from __future__ import annotations

from importlib import import_module

from runner import rooms
from runner.core.module_path import __version__ as __version__

TYPE_CHECKING = False  # under -m, a `typing.py` in the current folder would be imported
if TYPE_CHECKING:
    from runner.core import errors as errors
    from runner.core.build.build import build
    from runner.core.build.setup import Components
    from runner.core.checks.outputs import sanitise
    from runner.core.config.composing import compose
    from runner.core.config.run_config import RunConfig
    from runner.core.execution.evaluation import evaluate
    from runner.core.interfaces.hook import Hook, Verdict
    from runner.core.interfaces.technique import Evidence, Technique
    from runner.core.jobs.train import train
    from runner.core.record.summary import Summary
    from runner.datasets.trained import Trained, load
    from runner.diagnose.debugging import debug_operation, debugger, profile
    from runner.diagnose.memory import Memory, system_info
    from runner.diagnose.profile import profile_model
    from runner.loops.guarded_optimizer import train_step
    from runner.loops.inference import safe_inference
    from runner.loops.input_checks import validate_inputs
    from runner.loops.model_check import check_model
    from runner.loops.optimize import optimize, optimize_model, optimize_training_loop
    from runner.loops.pipeline import create_training_pipeline
    from runner.loops.stability import Stability
    from runner.measure.benchmark.live_model import benchmark_optimizations, show_comparison
    from runner.measure.discover import compare


rooms.install()

__all__ = [
    "Components", "Evidence", "Hook", "Memory", "RunConfig", "Stability", "Summary",
    "Technique", "Trained", "Verdict", "__version__", "benchmark_optimizations", "build",
    "check_model", "compare",
    "compose", "create_training_pipeline", "debug_operation", "debugger", "evaluate", "load",
    "optimize", "optimize_model", "optimize_training_loop", "profile", "profile_model",
    "safe_inference", "sanitise", "show_comparison", "system_info", "train", "train_step",
    "validate_inputs",
]  # fmt: skip

_MODULE_BY_NAME = {
    "Components": "runner.core.build.setup",
    "Evidence": "runner.core.interfaces.technique",
    "Hook": "runner.core.interfaces.hook",
    "Memory": "runner.diagnose.memory",
    "RunConfig": "runner.core.config.run_config",
    "Stability": "runner.loops.stability",
    "Summary": "runner.core.record.summary",
    "Technique": "runner.core.interfaces.technique",
    "Trained": "runner.datasets.trained",
    "Verdict": "runner.core.interfaces.hook",
    "benchmark_optimizations": "runner.measure.benchmark.live_model",
    "build": "runner.core.build.build",
    "check_model": "runner.loops.model_check",
    "compare": "runner.measure.discover",
    "compose": "runner.core.config.composing",
    "create_training_pipeline": "runner.loops.pipeline",
    "debug_operation": "runner.diagnose.debugging",
    "debugger": "runner.diagnose.debugging",
    "evaluate": "runner.core.execution.evaluation",
    "load": "runner.datasets.trained",
    "optimize": "runner.loops.optimize",
    "optimize_model": "runner.loops.optimize",
    "optimize_training_loop": "runner.loops.optimize",
    "profile": "runner.diagnose.debugging",
    "profile_model": "runner.diagnose.profile",
    "safe_inference": "runner.loops.inference",
    "sanitise": "runner.core.checks.outputs",
    "show_comparison": "runner.measure.benchmark.live_model",
    "system_info": "runner.diagnose.memory",
    "train": "runner.core.jobs.train",
    "train_step": "runner.loops.guarded_optimizer",
    "validate_inputs": "runner.loops.input_checks",
}


if not TYPE_CHECKING:  # a type checker knows the names above, and refuses others

    def __getattr__(name):
        """Import a public name on first access: `import runner` alone imports no torch."""
        if name == "errors":  # whose classes are caught: `except runner.errors.RunnerError`
            return import_module("runner.errors")
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    """Return the public names alone."""
    return sorted(__all__)
