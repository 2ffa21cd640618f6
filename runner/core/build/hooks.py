"""Construction of a run's hooks, in order of entry, and of its batch checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from runner import rooms
from runner.core.build.data import RunData
from runner.core.build.setup import Setup
from runner.core.checks.batch import BatchChecks, DataSpec
from runner.core.checks.batch_validator import BatchValidator
from runner.core.checks.model import ModelCheck
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import TensorsDataset
from runner.core.data.loader import BatchLoader
from runner.core.device.resources import SystemMonitor
from runner.core.errors import ConfigError, OutOfMemory, WorkerLost
from runner.core.hooks.progress import ProgressDisplay
from runner.core.hooks.recording import Recording
from runner.core.hooks.resources import Resources
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.schemas.debug import DebugConfig, enabled_tools

HOOKS_KEY = "debug.hooks"
MIN_WATCHED_STEPS = 50  # of a run whose speed is watched


def build_hooks(setup: Setup, run_data: RunData, debug: DebugConfig) -> list[Hook]:
    """Construct a run's hooks in order of entry; `debug` fits its length. Raises ConfigError."""
    config, folder, resolve = setup.config, setup.record_folder, setup.resolve_target
    stats = [rooms.find("processes", "stats")()] if setup.is_shared else []
    hooks: list[Hook] = [*run_data.hooks, *stats]
    tools = load_debug_tools(debug)
    monitor = SystemMonitor(folder, config.monitoring.system_every_s, config.stability.watch.gpu)
    if folder is not None and config.monitoring.sinks:
        from runner.core.hooks.sinks import Sinks, make_sinks

        sinks = make_sinks(config.monitoring.sinks, resolve)
        hooks.append(Sinks(sinks, config.monitoring.sink_timeout_s, setup.settings))
    if folder is not None:
        recorded = config.monitoring, setup.settings, monitor, bool(tools), run_data.files
        hooks.append(Recording(*recorded))
    if config.device.clean_above is not None or config.stability.watch.enabled:
        hooks.append(Resources(config.device.clean_above, config.stability.watch, monitor))
    is_long = config.training.steps is None or config.training.steps >= MIN_WATCHED_STEPS
    if config.stability.watch.enabled and config.stability.watch.watches_speed and is_long:
        from runner.core.hooks.slowdown import Slowdown  # imported only if used

        hooks.append(Slowdown(config.stability.watch))
    if config.security.limits.has_limit:
        from runner.core.hooks.limits import Limits  # imported only if used

        hooks.append(Limits(config.security.limits))
    if not debug.memory.enabled:  # it includes the report
        hooks.append(OomReport())
    if config.checks.model.enabled:  # before the tools, which add hooks to the model
        hooks.append(ModelCheck())
    hooks += tools
    hooks += [_make_user_hook(h, f"{HOOKS_KEY}.{i}", resolve) for i, h in enumerate(debug.hooks)]
    if config.monitoring.samples or config.data.kind == "text_lm":
        from runner.core.hooks.text_samples import text_samples  # imported only if used

        hooks += text_samples(config, run_data.data)
    if config.monitoring.progress:
        hooks.append(ProgressDisplay(config.monitoring))
    return [*hooks, *setup.components.hooks]


def attach_batch_validator(
    config: RunConfig, run: Run, train: BatchLoader
) -> BatchValidator | None:
    """Set and return the loader's batch validator; None if the checks are off."""
    if not config.checks.inputs.enabled:
        return None
    objective, sizes = run.objective, run.sizes
    spec = DataSpec(objective.indices, objective.ignored, sizes.vocab)
    source, sampler = train.fetch.source, train.fetch.order
    table = (source.inputs, source.target) if type(source) is TensorsDataset else None
    train.inspector = BatchValidator(
        BatchChecks(config.checks.inputs, spec),
        run.history,
        run.folder,
        run.device.torch,
        first_batch=train.fetch_on_cpu,
        indices=train.indices,
        table=table,
        rows=sampler.indices,
        smallest=len(sampler.indices) % sampler.batch_size or sampler.batch_size,
    )
    return train.inspector


def record_lost_worker(run: Run, lost: WorkerLost) -> None:
    """Count and log a replaced data worker, with its stack in `debug/history.json`."""
    message = str(lost).partition("\n")[0]
    step, action = run.progress.step, "replaced; it fetches the same batches"
    run.history.add("data_worker", message, step=step, category="data", action=action, error=lost)


class OomReport(Hook):
    """Writes a memory breakdown if out of memory ends the run; no cost before."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Write debug/out_of_memory.md if the run ends with `OutOfMemory`."""
        try:
            yield
        except OutOfMemory as error:
            rooms.find("debug", "out_of_memory")(run, str(error))
            raise


def load_debug_tools(debug: DebugConfig) -> list[Hook]:
    """Construct the enabled debug tools; others are not imported."""
    tools = []
    for path in enabled_tools(debug):
        module, _, name = path.partition(":")
        tools.append(getattr(import_module(module), name)(debug))
    return tools


def _make_user_hook(item: Any, key: str, resolve: Callable[[str, str], Any]) -> Hook:
    """Construct a user's hook: `package.Class` or `{_target_: package.Class, argument: …}`."""
    if isinstance(item, dict) and "_target_" not in item:
        raise ConfigError(key, "_target_ is missing", "write {_target_: package.Class, …}")
    from runner.core.security.registry import instantiate_nested

    hook = instantiate_nested({"_target_": item} if isinstance(item, str) else item, resolve, key)
    if not isinstance(hook, Hook):
        raise ConfigError(key, f"{type(hook).__name__} is not a Hook", "inherit from runner.Hook")
    return hook
