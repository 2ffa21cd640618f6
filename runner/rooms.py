"""Where modules are found that documents, messages and files of runs name by an earlier path."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # under -m, a `typing.py` in the current folder would be imported
if TYPE_CHECKING:
    from types import ModuleType

MOVED = {
    "runner.benchmark.auto.resolve": "runner.measure.auto.resolve",
    "runner.captures.reader": "runner.diagnose.replay.capture_reader",
    "runner.composing": "runner.core.config.composing",
    "runner.config": "runner.core.config.run_config",
    "runner.errors": "runner.core.errors",
    "runner.library.debugging": "runner.diagnose.debugging",
    "runner.library.stability": "runner.loops.stability",
    "runner.models.preserved_state": "runner.core.preserved_state",
    "runner.objectives.base": "runner.core.interfaces.objective",
    "runner.record.sinks.base": "runner.core.record.sinks.base",
    "runner.replay.attempt": "runner.diagnose.replay.attempt",
    "runner.replay.reopen": "runner.diagnose.replay.reopen",
}
"""Modules by their earlier path: in users' imports, and in the reproduce.py of a run."""

_PACKAGES = {name.rpartition(".")[0] for name in MOVED} | {"runner.benchmark", "runner.record"}


class _MovedModules:
    """Finds each module of `MOVED`, which is the same module under both names."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in MOVED:
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        if name in _PACKAGES and name != "runner":
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in MOVED:
            sys.modules[name] = import_module(MOVED[name])


def install() -> None:
    """Let imports find the moved modules, after all other ways to find one."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())  # type: ignore[arg-type]
