"""Composition of a `RunConfig` from overrides by Hydra; only this module sees DictConfigs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import RLock
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # OmegaConf's parser

from runner.core.config.groups import CONF
from runner.core.config.run_config import NON_RUN_KEYS, SCHEMAS, RunConfig
from runner.core.errors import ConfigError, RunnerError, SecurityError, UsageError
from runner.core.format import nearest
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.sweep import JobSweeperConfig, LauncherConfig, SearchSweeperConfig
from runner.core.security import config_files, secrets
from runner.core.security.cli_overrides import parse_overrides, parse_security_overrides
from runner.core.security.config_files import ConfigFileChecker

log = logging.getLogger("runner")

BUILTIN_FOLDERS = (CONF.resolve(), Path(hydra.__file__).resolve().parent / "conf")
"""Config folders that are exempt from checks."""
OUTPUT_FOLDERS = {
    JobKind.evaluate: "evaluations",
    JobKind.predict: "predictions",
    JobKind.verify: "verifications",
    JobKind.replay: "replays",
    JobKind.benchmark: "benchmarks",
    JobKind.scan: "scans",
    JobKind.doctor: "doctor",
}
"""Folders below `outputs/` by job, so that the newest of `outputs/runs` is a training."""
REQUIRED_KEYS = ("checkpoint.resume", "scan.path", "replay.path")
MAX_SAMPLE_JOBS = 4  # of a sweep that are composed before it is suggested
_LOCK = RLock()  # Hydra's state, and the readable variables, are process-wide


def register() -> None:
    """Register schemas and the resolvers of config.yaml with Hydra."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    store.store(group="hydra/launcher", name="isolated", node=LauncherConfig, provider="runner")
    for name, node in (("jobs", JobSweeperConfig), ("search", SearchSweeperConfig)):
        store.store(group="hydra/sweeper", name=name, node=node, provider="runner")
    for group, schemas in SCHEMAS.items():
        for kind, schema in schemas.items():
            store.store(group=f"schema/{group}", name=kind, node=schema)
    secrets.install_resolvers()
    config_files.limit_interpolations()
    replace_typed_mappings()
    resolver = partial(OmegaConf.register_new_resolver, replace=True)
    resolver("runner.name", _default_name)
    resolver("runner.home", lambda k: OUTPUT_FOLDERS.get(JobKind(getattr(k, "value", k)), "runs"))
    resolver("runner.id", lambda: token_hex(3), use_cache=True)
    # cached by its argument's text: all jobs of a sweep get the first one's value
    resolver("runner.once", lambda value: value, use_cache=True)


def replace_typed_mappings() -> None:
    """Let a typed mapping, such as `optimizer.options={}`, replace that of our config.

    Hydra merges the two. `+optimizer.options={…}` adds to it, a dotted key changes one entry.
    """
    loader: Any = ConfigLoaderImpl
    original = loader._apply_overrides_to_config
    if getattr(original, "replaces", False):
        return

    def apply(overrides: list[Override], config: DictConfig) -> None:
        for override in overrides:
            key, value = override.key_or_group, override.value()
            whole = isinstance(value, dict) and not (override.is_add() or override.is_delete())
            if whole and OmegaConf.get_type(config) is RunConfig:
                node = OmegaConf.select(config, key, throw_on_missing=False)
                if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict:
                    OmegaConf.update(config, key, {}, merge=False)
                    override = replace(override, type=OverrideType.FORCE_ADD)
            original([override], config)

    apply.replaces = True  # type: ignore[attr-defined]
    loader._apply_overrides_to_config = staticmethod(apply)


def _default_name(*, _root_: DictConfig) -> str:
    if _root_.job.kind in (JobKind.doctor, JobKind.scan):
        return str(_root_.job.kind.name)
    parts = (_root_[group] for group in SCHEMAS)
    return "-".join((part.get("_target_") or part.kind).rpartition(".")[2] for part in parts)


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the config that `python -m runner` has with these overrides.

    Works inside another Hydra application and in several threads. Raises ConfigError.
    """
    from runner.core.config.composed import remember
    from runner.core.config.spelling import normalize_overrides

    if isinstance(overrides, str):
        raise UsageError(f"compose: overrides must be a list, got a string; use [{overrides!r}]")
    if not isinstance(overrides, Sequence) or not all(isinstance(o, str) for o in overrides):
        raise UsageError("compose: overrides must be a list of strings: 'training.steps=100'")
    with _LOCK, secrets.environment_access(parse_security_overrides(overrides).readable_variables):
        if not any("hydra.searchpath" in text for text in overrides):
            normal = normalize_overrides(overrides, compose_raw)
            return remember(typed(compose_raw(normal, hydra_too=True)), [*overrides])
        cli = parse_overrides(overrides, CONF)
        files = ConfigFileChecker(BUILTIN_FOLDERS, cli, user_folders=cli.search_folders)
        files.check_reserved_names()
        with files.at_work():
            normal = normalize_overrides(overrides, compose_raw, cli.search_folders)
            config = typed(compose_raw(normal, hydra_too=True))
        for note in files.notes:
            log.info("%s", note)
        return remember(config, [*overrides])


def compose_raw(
    overrides: Sequence[str],
    config_name: str = "config",
    folders: Sequence[Path] = (),
    hydra_too: bool = False,
    conf: Path = CONF,
) -> DictConfig:
    """Compose an untyped config, also of groups in `folders`. Raises ConfigError."""
    path = [f"hydra.searchpath={[f'file://{folder.absolute()}' for folder in folders]}"]

    def compose(overrides: list[str], hydra_too: bool = True) -> DictConfig:
        searched = [*(path if folders else []), *overrides]
        return _compose(searched, config_name, hydra_too, conf, folders)

    config_files.reset_interpolation_counters()
    try:
        config = compose(list(overrides), hydra_too)
        if any(text.startswith("+") for text in overrides):
            _check_keys(config, ignored_key="hydra")
        return config
    except YAMLError as error:
        raise ConfigError("config", " ".join(str(error).split()), "correct that file") from error
    except (HydraException, OmegaConfBaseException, ValueError, UnknownKey) as error:
        if (refusal := secrets.find_refusal(error)) and not isinstance(error, UnknownKey):
            raise refusal from None
        from runner.core.config.diagnosis import explain_error

        composes = partial(_is_composable, compose=partial(compose, hydra_too=False))
        raise explain_error(error, overrides, compose, composes, folders) from None


def _is_composable(overrides: list[str], compose: Callable[[list[str]], DictConfig]) -> bool:
    """Whether overrides (of a sweep the first jobs) compose, or only lack values or trust."""
    from runner.core.config.spelling import normalize_overrides, sample_jobs

    try:
        for job in sample_jobs(overrides)[:MAX_SAMPLE_JOBS]:
            config = compose(normalize_overrides(job, compose))
            if not OmegaConf.missing_keys(config):
                typed(config)
    except (RunnerError, HydraException, OmegaConfBaseException, ValueError) as error:
        return isinstance(error, SecurityError) or getattr(error, "key", "") in REQUIRED_KEYS
    return True


def _compose(
    overrides: list[str], name: str, hydra_too: bool, conf: Path, folders: Sequence[Path]
) -> DictConfig:
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra

    with _LOCK:
        state, base = GlobalHydra.instance(), version.VersionBase.instance()
        outer, outer_base = state.hydra, base.version_base
        state.clear()
        try:
            with hydra.initialize_config_dir(str(conf), job_name="runner", version_base="1.3"):
                if name != "config":  # which is not looked for in hydra.searchpath
                    loader: Any = state.instance().config_loader()
                    for folder in folders:
                        path = f"file://{folder.absolute()}"
                        loader.get_search_path().prepend("command-line", path, "schema")
                    loader.repository.initialize_sources(loader.get_search_path())
                return hydra.compose(name, overrides, return_hydra_config=hydra_too)
        finally:
            state.hydra, base.version_base = outer, outer_base
            GlobalHydra.set_instance(state)  # Hydra has replaced it by a copy


def typed(config: DictConfig) -> RunConfig:
    """Convert a config to validated dataclasses; Hydra's section resolves `${hydra:…}` and goes.

    Raises ConfigError for unknown keys, and those without a value or an interpolation's target.
    """
    config_files.reset_interpolation_counters()
    with _LOCK, _without_hydra_section(config):
        _check_keys(config)
        try:
            if missing := sorted(OmegaConf.missing_keys(config)):
                others = f" (also missing: {', '.join(missing[1:])})" if missing[1:] else ""
                raise ConfigError(missing[0], f"has no value{others}", f"give one: {missing[0]}=…")
            with secrets.current_environment_access(_allowed_environment(config)):
                run_config = OmegaConf.to_object(config)
                secrets.record_secret_keys(config)
        except OmegaConfBaseException as error:
            if refusal := secrets.find_refusal(error):
                raise refusal from None
            from runner.core.config.diagnosis import conversion_problem
            from runner.core.security.interpolations import failed_interpolation

            failed = failed_interpolation(config)
            key, cause = failed or (error.full_key or "config", error)
            reason = secrets.mask_words(conversion_problem(str(cause).partition("\n")[0]))
            raise ConfigError(key, reason) from error
    if not isinstance(run_config, RunConfig):
        fix = "start its defaults list like conf/config.yaml"
        raise ConfigError("config", "is not a run config", fix)
    return run_config


@contextmanager
def _without_hydra_section(config: DictConfig) -> Iterator[None]:
    """Remove Hydra's section from a config; `${hydra:…}` reads it while entered."""
    if "hydra" not in config:  # set by Hydra for the job
        yield
        return
    global_config: Any = HydraConfig.instance()
    before = global_config.cfg
    if "${hydra:" in str(OmegaConf.to_container(config, resolve=False)):
        full_config = global_config.cfg = config.copy()
        with read_write(full_config.hydra), open_dict(full_config.hydra):
            if OmegaConf.is_missing(full_config.hydra.job, "num"):
                full_config.hydra.job.num, full_config.hydra.job.id = 0, "0"
            if OmegaConf.is_missing(full_config.hydra.runtime, "output_dir"):
                path = str(secrets.read_path(full_config, "hydra.run.dir"))
                full_config.hydra.runtime.output_dir = path
    with open_dict(config):
        del config["hydra"]
    try:
        yield
    finally:
        global_config.cfg = before


class UnknownKey(ConfigError):
    """A key that its schema lacks."""


def _check_keys(config: DictConfig, ignored_key: str = "", prefix: str = "") -> None:
    """Raise UnknownKey for a key that its schema lacks, at any depth, except `ignored_key`."""
    schema = OmegaConf.get_type(config)
    known_keys = getattr(schema, "__dataclass_fields__", None)
    for key in config:
        name = f"{prefix}{key!s}"
        if name == ignored_key:
            continue
        if known_keys is not None and key not in known_keys:
            suggestion = nearest(name, [f"{prefix}{k}" for k in known_keys])
            available = ", ".join(f"{prefix}{k}" for k in known_keys)
            fix = f"did you mean {suggestion}?" if suggestion else f"available: {available}"
            raise UnknownKey(name, "no such key", fix)
        node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            _check_keys(node, prefix=f"{name}.")


def _allowed_environment(config: DictConfig) -> list[str]:
    """Return the environment variables that the config allows to be read."""
    node = config._get_node("security", validate_access=False)
    security: Any = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else {}
    names = security.get("environment") if isinstance(security, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def config_from_plain(tree: Mapping[str, Any], trusted: Sequence[str] = ()) -> RunConfig:
    """Restore a config from the output of `WrittenConfig.plain`.

    The caller decides which classes are trusted. Raises ConfigError if it does not fit this
    version, SecurityError for an untrusted class and for anything but plain data.
    """
    from runner.core.security.interpolations import check_literal  # imported only if used

    check_literal(tree, may_read=secrets.permitted_variables())
    try:
        config = OmegaConf.structured(RunConfig)
        for group, schemas in SCHEMAS.items():
            config[group] = OmegaConf.structured(schemas[tree[group]["kind"]])
        run_tree = {key: value for key, value in tree.items() if key not in NON_RUN_KEYS}
        stability = run_tree.get("stability")
        if isinstance(stability, Mapping):  # an earlier version's has a table of remedies
            run_tree["stability"] = {k: x for k, x in stability.items() if k != "recovery"}
        merged: Any = OmegaConf.merge(config, run_tree, {"security": {"trusted": list(trusted)}})
    except (OmegaConfBaseException, LookupError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError("config", f"does not fit this version's schema ({reason})") from error
    return typed(merged)


register()
