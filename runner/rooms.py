"""The rooms of the package, and the table of names by which one reaches what lies in another.

Who may import whom is in docs/architecture.md; whatever else a room uses of another one is named
here and imported when it is asked for. A room whose folder is missing is named in a UsageError.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # under -m, a `typing.py` in the current folder would be imported
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

NAMES = {
    "job": {
        "train": "core.jobs.train:main",
        "evaluate": "core.jobs.evaluate:main",
        "predict": "datasets.predict:main",
        "doctor": "diagnose.doctor:main",
        "verify": "measure.verify.job:main",
        "replay": "diagnose.replay.job:main",
        "benchmark": "measure.benchmark.job:main",
        "scan": "scan.job:main",
    },
    "auto": {"resolve": "measure.auto.resolve:resolve_auto"},
    "comparison": {
        "curves": "measure.curves:draw_run_curves",
        "sweep": "measure.sweep_speed:compare_sweep",
    },
    "data": {
        "digits": "core.data.embedded:digits",
        "cancer": "core.data.embedded:cancer",
        "stdlib_text": "datasets.text:stdlib_text",
        "stdlib_parts": "datasets.text:stdlib_parts",
        "synthetic": "core.data.embedded:synthetic",
        "tabular": "datasets.tabular:tabular",
        "images": "datasets.images:ImageFolder",
        "text": "datasets.text:text",
        "text_lm": "datasets.tokens:text_lm",
        "tokens": "datasets.tokens:tokens",
        "arrays": "core.data.arrays:arrays",
    },
    "debug": {"out_of_memory": "diagnose.debug.memory:write_oom_report"},
    "export": {"check": "datasets.export:check_export_packages", "write": "datasets.export:export"},
    "files": {
        "encode_texts": "datasets.hugging_face_files:encode_texts",
        "folder": "scan.scan:scan_folder",
        "sandbox": "scan.sandbox:Sandbox",
        "split_names": "datasets.saved_dataset:split_names",
    },
    "checks": {"table": "datasets.table_checks:check_data_table"},
    "hparams": {"sweep": "scale.sweep.state:shared_overrides"},
    "model": {"hf": "datasets.hugging_face_model:build_pretrained"},
    "notebook": {
        "comparison": "measure.table:show_comparison",
        "comparison_text": "measure.table:comparison_text",
        "run": "core.jobs.run_report:show_run",
        "summary": "core.jobs.run_report:show_summary",
    },
    "plots": {"run": "measure.run_plots:write_plots"},
    "replay": {"step": "diagnose.replay.step:replay_step"},
    "preflight": {
        "benchmark": "measure.benchmark.regression:check_arms",
        "scan": "scan.job:find_scan_path",
    },
    "processes": {
        "config": "scale.distributed.join:config_for_rank",
        "launch": "scale.distributed.launch:main",
        "join": "scale.distributed.join:join_from_program",
        "parallel": "scale.distributed.parallel:parallelise",
        "stats": "scale.distributed.process_stats:ProcessStats",
    },
}
"""`room.module:attribute` by kind and name."""

MOVED = {
    "runner.benchmark.auto.resolve": "runner.measure.auto.resolve",
    "runner.captures.reader": "runner.diagnose.replay.reopen",
    "runner.composing": "runner.core.config.composing",
    "runner.config": "runner.core.config.run_config",
    "runner.diagnose.replay.attempt": "runner.diagnose.replay.reopen",
    "runner.diagnose.replay.capture_reader": "runner.diagnose.replay.reopen",
    "runner.errors": "runner.core.errors",
    "runner.library.debugging": "runner.diagnose.debugging",
    "runner.library.stability": "runner.loops.stability",
    "runner.models.preserved_state": "runner.core.preserved_state",
    "runner.objectives.base": "runner.core.interfaces.objective",
    "runner.record.sinks.base": "runner.core.record.sinks.base",
    "runner.replay.attempt": "runner.diagnose.replay.reopen",
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


def find(kind: str, name: str, needed_by: str = "") -> Any:
    """Return what `NAMES` names, which may lie in another room.

    `needed_by` is the key and value, as typed, that the user gave. UsageError if the room's folder
    is missing.
    """
    module, _, attribute = NAMES[kind][name].partition(":")
    require(module.partition(".")[0], needed_by or f"{kind} {name}")
    return getattr(import_module(f"runner.{module}"), attribute)


def require(room: str, needed_by: str) -> None:
    """Raise UsageError if the room's folder is missing."""
    try:
        import_module(f"runner.{room}")
    except ModuleNotFoundError as error:
        if error.name != f"runner.{room}":
            raise
        from runner.core.errors import UsageError

        raise UsageError(f"{needed_by} needs runner.{room}") from None


def install() -> None:
    """Let imports find the moved modules, after all other ways to find one."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
