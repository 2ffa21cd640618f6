"""From overrides to a `RunConfig`: Hydra composes, and after `typed` nothing sees its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.config import NOT_OF_THE_RUN, RunConfig
from runner.data import config as data_config
from runner.errors import ConfigError, RunnerError, SecurityError, UsageError
from runner.jobs.config import JobKind
from runner.models import config as model_config
from runner.overrides.groups import CONF
from runner.security import hidden, secrets
from runner.security.cli_overrides import typed_security
from runner.security.config_rules import bound_references, restart_reference_count
from runner.security.plain import check_plain
from runner.sweep.config import LauncherConfig

_LOCK = RLock()  # Hydra's state, and which variables may be read, belong to the process


def register() -> None:
    """Tell Hydra every key and its type, and what the names in config.yaml stand for.

    Data and model have one schema per option, so that an option has its own keys and no others.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    store.store(group="hydra/launcher", name="isolated", node=LauncherConfig, provider="runner")
    for group, schemas in (("data", data_config.OPTIONS), ("model", model_config.OPTIONS)):
        for kind, schema in schemas.items():
            store.store(group=f"schema/{group}", name=kind, node=schema)
    secrets.install()
    bound_references()
    OmegaConf.register_new_resolver("runner.name", _default_name, replace=True)
    OmegaConf.register_new_resolver("runner.id", _random_id, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("runner.home", _home, replace=True)
    # cached by the text of its argument: jobs of a sweep get what the first one got
    OmegaConf.register_new_resolver("runner.once", _same, use_cache=True, replace=True)


def _default_name(*, _root_: DictConfig) -> str:
    if _root_.job.kind in (JobKind.doctor, JobKind.scan):
        return str(_root_.job.kind.name)
    names = []
    for group in ("data", "model"):
        part = _root_[group]
        names.append((part.get("_target_") or part.kind).rpartition(".")[2])
    return "-".join(names)


NEEDED = ("checkpoint.resume", "scan.path", "replay.path")
JOBS = 4  # of a sweep, that are composed before it is suggested
HOMES = {
    JobKind.evaluate: "evaluations",
    JobKind.verify: "verifications",
    JobKind.replay: "replays",
    JobKind.benchmark: "benchmarks",
    JobKind.scan: "scans",
    JobKind.doctor: "doctor",
}


def _home(kind: Any) -> str:
    """Other jobs than training lie apart: the newest folder of `outputs/runs` is a training's."""
    return HOMES.get(JobKind(getattr(kind, "value", kind)), "runs")


def _random_id() -> str:
    from secrets import token_hex

    return token_hex(3)


def _same(value: Any) -> Any:
    return value


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The config that `python -m runner` would have with these overrides.

    Works inside another Hydra application and in several threads. Raises ConfigError.
    """
    from runner.overrides.spelling import spelled

    if isinstance(overrides, str):
        raise UsageError(f"compose: overrides is one string; give a list: [{overrides!r}]")
    if not isinstance(overrides, Sequence) or not all(isinstance(o, str) for o in overrides):
        raise UsageError("compose: overrides is a list of texts, as 'training.steps=100'")
    with _LOCK, secrets.door(typed_security(overrides, CONF).readable):
        return typed(compose_raw(spelled(overrides, compose_raw), hydra_too=True))


def compose_raw(
    overrides: Sequence[str],
    config_name: str = "config",
    folders: Sequence[Path] = (),
    hydra_too: bool = False,
    conf: Path = CONF,
) -> DictConfig:
    """What Hydra composes, untyped, with the groups in `folders` besides those in `conf`.

    Hydra's own state is left as it was. Raises ConfigError.
    """

    def compose(overrides: list[str], hydra_too: bool = True) -> DictConfig:
        path = [f"hydra.searchpath={[f'file://{folder.absolute()}' for folder in folders]}"]
        return _compose([*(path if folders else []), *overrides], config_name, hydra_too, conf)

    def composes(overrides: list[str]) -> bool:
        return _composes(overrides, partial(compose, hydra_too=False))

    def check_added(config: DictConfig) -> None:
        from runner.overrides.diagnosis import added

        for key, _ in _unknown(config, ""):
            if not key.startswith("hydra"):
                if error := added(key, overrides, compose, composes, folders):
                    raise error

    restart_reference_count()
    try:
        found = compose(list(overrides), hydra_too)
        if any(text.startswith("+") for text in overrides):
            check_added(found)
        return found
    except YAMLError as error:
        raise ConfigError("config", " ".join(str(error).split()), "mend that file") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if refused := secrets.refusal_in(error):
            raise refused from None
        from runner.overrides.diagnosis import explain

        raise explain(error, overrides, compose, composes, folders) from error


def _composes(overrides: list[str], compose: Callable[[list[str]], DictConfig]) -> bool:
    """Whether they make the config of a run, or one that lacks mandatory values; of a sweep the
    first jobs.
    """
    from runner.overrides.spelling import some_jobs, spelled

    try:
        for job in some_jobs(overrides)[:JOBS]:
            config = compose(spelled(job, compose))
            if not OmegaConf.missing_keys(config):
                typed(config)
    except ConfigError as error:
        return error.key in NEEDED  # another value, to be named next
    except SecurityError:  # whom to trust is for the user to say, who is asked for it next
        return True
    except (RunnerError, HydraException, OmegaConfBaseException, ValueError):
        return False
    return True


def _compose(
    overrides: list[str], config_name: str, hydra_too: bool, conf: Path = CONF
) -> DictConfig:
    import hydra
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra

    with _LOCK:
        state, base = GlobalHydra.instance(), version.VersionBase.instance()
        outer, outer_base = state.hydra, base.version_base
        state.clear()
        try:
            with hydra.initialize_config_dir(str(conf), job_name="runner", version_base="1.3"):
                return hydra.compose(config_name, overrides, return_hydra_config=hydra_too)
        finally:
            state.hydra, base.version_base = outer, outer_base
            GlobalHydra.set_instance(state)  # Hydra puts a copy in its place


def typed(config: DictConfig) -> RunConfig:
    """The dataclasses that `config` describes, every check of theirs passed.

    Hydra's own part, where there is one, answers `${hydra:…}` and is taken out of `config`. Raises
    ConfigError for a key that no schema has, a mandatory one without a value, and an interpolation
    that leads nowhere.
    """
    restart_reference_count()
    with _LOCK, _hydra_part(config):
        return _typed(config)


@contextmanager
def _hydra_part(config: DictConfig) -> Iterator[None]:
    """Take Hydra's part out of a config; while entered, `${hydra:…}` reads it."""
    if "hydra" not in config:  # a job's: Hydra has set its part
        yield
        return
    about: Any = HydraConfig.instance()
    before = about.cfg
    if "${hydra:" in str(OmegaConf.to_container(config, resolve=False)):
        whole = about.cfg = config.copy()
        with read_write(whole.hydra), open_dict(whole.hydra):
            if OmegaConf.is_missing(whole.hydra.job, "num"):
                whole.hydra.job.num, whole.hydra.job.id = 0, "0"
            if OmegaConf.is_missing(whole.hydra.runtime, "output_dir"):
                whole.hydra.runtime.output_dir = str(secrets.place(whole, "hydra.run.dir"))
    with open_dict(config):
        del config["hydra"]
    try:
        yield
    finally:
        about.cfg = before


def _typed(config: DictConfig) -> RunConfig:
    for key, known in _unknown(config, ""):
        raise no_such_key(key, known)
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            also = f" (also missing: {', '.join(missing[1:])})" if missing[1:] else ""
            raise ConfigError(missing[0], f"has no value{also}", f"give one: {missing[0]}=…")
        with secrets.a_door(_may_read(config)):
            found = OmegaConf.to_object(config)
            hidden.note(config)
    except OmegaConfBaseException as error:
        if refused := secrets.refusal_in(error):
            raise refused from None
        first = secrets.named(str(error).partition("\n")[0])
        raise ConfigError(error.full_key or "config", first) from error
    if not isinstance(found, RunConfig):
        raise ConfigError(
            "config", "is not that of a run", "its defaults must begin as conf/config.yaml"
        )
    return found


def no_such_key(key: str, known: Sequence[str]) -> ConfigError:
    """With the one that was probably meant, else with all that there are."""
    from runner.overrides.suggestions import nearest

    near = nearest(key, known)
    fix = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
    return ConfigError(key, "there is no such key", fix)


def _may_read(config: DictConfig) -> list[str]:
    """The variables that the config of another application says it may read."""
    found = OmegaConf.to_container(config, resolve=False)
    security = found.get("security") if isinstance(found, dict) else None
    names = security.get("environment") if isinstance(security, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _unknown(config: DictConfig, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Keys added with `+` that the schema does not know, at any depth, and those it does know."""
    schema = OmegaConf.get_type(config)
    known = getattr(schema, "__dataclass_fields__", None)
    for key in config:
        name = f"{prefix}{key!s}"
        if known is not None and key not in known:
            yield name, [f"{prefix}{k}" for k in known]
        elif not OmegaConf.is_missing(config, key):
            node = config._get_node(key)
            if isinstance(node, DictConfig) and not node._is_none():
                yield from _unknown(node, f"{name}.")


def from_plain(found: Mapping[str, Any], trusted: Sequence[str] = ()) -> RunConfig:
    """The config that `plain` took apart; whom to trust is for the caller to say.

    Raises ConfigError where it does not fit this version, SecurityError for a class not trusted
    and for what is no plain data.
    """
    check_plain(found, may_read=secrets.permitted())
    try:
        config = OmegaConf.structured(RunConfig)
        for group, schemas in (("data", data_config.OPTIONS), ("model", model_config.OPTIONS)):
            config[group] = OmegaConf.structured(schemas[found[group]["kind"]])
        kept = {key: value for key, value in found.items() if key not in NOT_OF_THE_RUN}
        merged = OmegaConf.merge(config, kept, {"security": {"trusted": list(trusted)}})
    except (OmegaConfBaseException, LookupError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError("config", f"is not one of this version's runs ({reason})") from error
    if not isinstance(merged, DictConfig):
        raise ConfigError("config", "is not that of a run")
    return typed(merged)


register()
