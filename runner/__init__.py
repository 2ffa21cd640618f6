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

_NAMES_BY_MODULE = {
    "core.build.build": "build",
    "core.build.setup": "Components",
    "core.checks.outputs": "sanitise",
    "core.config.composing": "compose",
    "core.config.run_config": "RunConfig",
    "core.execution.evaluation": "evaluate",
    "core.interfaces.hook": "Hook Verdict",
    "core.interfaces.technique": "Evidence Technique",
    "core.jobs.train": "train",
    "core.record.summary": "Summary",
    "datasets.trained": "Trained load",
    "diagnose.debugging": "debug_operation debugger profile",
    "diagnose.memory": "Memory system_info",
    "diagnose.profile": "profile_model",
    "loops.guarded_optimizer": "train_step",
    "loops.inference": "safe_inference",
    "loops.input_checks": "validate_inputs",
    "loops.model_check": "check_model",
    "loops.optimize": "optimize optimize_model optimize_training_loop",
    "loops.pipeline": "create_training_pipeline",
    "loops.stability": "Stability",
    "measure.benchmark.live_model": "benchmark_optimizations show_comparison",
    "measure.discover": "compare",
}
_MODULE_BY_NAME = {n: f"runner.{m}" for m, names in _NAMES_BY_MODULE.items() for n in names.split()}


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
