"""A composed config, before anything in it is made, called, or written to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityLevel
from runner.security.intent import bounds
from runner.security.intent.keys import OF_LAUNCHERS, OF_SWEEPERS, REFUSED, default_of
from runner.security.intent.names import check_callbacks, check_logging, check_plugin, leaves
from runner.security.intent.places import check_place, typed_place
from runner.security.intent.said import Said, check_jobs, check_text, parse
from runner.security.targets import NAME, permit

LEVELS = list(SecurityLevel)  # from the least to the most
PLUGINS = (("launcher", Launcher, OF_LAUNCHERS), ("sweeper", Sweeper, OF_SWEEPERS))
LOGS = ("job_logging", "hydra_logging")
WRITES = ("filename", "submitit_folder", "temp_folder", "mmap_folder")


def check_composed(config: DictConfig, said: Said) -> None:
    """Raise SecurityError for what a config may not ask for; `config` has Hydra's own part too.

    What was typed may be more than what a file may say. ConfigError for what cannot be resolved.
    """
    _check_security(config, said)
    if "hydra" not in config:
        _check_names(config, said)
        return
    _check_name(config)
    hydra = _resolved(config)
    _check_names(config, said)
    _check_hydra(hydra, said)
    _check_places(hydra, said)
    _check_params(hydra.get("sweeper"), said)
    _check_arms(config, said)


def _check_security(config: DictConfig, said: Said) -> None:
    """A file may raise the level and lower a limit, and nothing else."""
    if "security" not in config:
        return
    try:
        found = OmegaConf.to_container(config.security, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError("security", " ".join(str(error).split())) from error
    if not isinstance(found, dict):
        raise SecurityError("security: is refused: it is no group of settings")
    typed = said.security
    level = str(found.get("level"))
    if level not in SecurityLevel.__members__:
        raise ConfigError("security.level", f"{level!r} is none of off, standard, strict")
    if LEVELS.index(SecurityLevel[level]) < LEVELS.index(typed.level):
        raise _not_from_a_file("security.level", level, "lower the level")
    for name, value in vars(typed).items():
        given = found.get(name)
        if isinstance(value, list):
            more = [one for one in given or () if one not in value]
            if more:
                raise _not_from_a_file(
                    f"security.{name}", f"[{','.join(map(str, more))}]", "allow more"
                )
    for name, limit in vars(typed.limits).items():
        given = (found.get("limits") or {}).get(name)
        if (given if given is not None else math.inf) > (limit if limit is not None else math.inf):
            raise _not_from_a_file(f"security.limits.{name}", given, "raise a limit")


def _not_from_a_file(key: str, value: object, what: str) -> SecurityError:
    return SecurityError(
        f"{key}: {value} is refused: a config file cannot {what}; "
        f"if you mean it, type {key}={value}"
    )


def _check_names(config: DictConfig, said: Said) -> None:
    """Every `_target_` of the run's own part, wherever it stands."""
    names = said.security.names
    tree: Any = OmegaConf.to_container(config, resolve=False)
    for key, value in leaves({k: v for k, v in tree.items() if k != "hydra"}, ""):
        if key.rpartition(".")[2] != "_target_" or value in (None, "", "???"):
            continue
        if isinstance(value, str) and "${" in value:
            try:
                value = OmegaConf.select(config, key)
            except OmegaConfBaseException as error:
                raise ConfigError(key, " ".join(str(error).split())) from error
        if value is not None:
            permit(str(value), key, names)


def _check_name(config: DictConfig) -> None:
    """Part of the run's folder, which is made before anybody looks at the rest."""
    try:
        name = str(OmegaConf.select(config, "name"))
    except OmegaConfBaseException:  # what it refers to is for the check of the whole config
        return
    if any(letter in name for letter in "/\\\0") or name in (".", ".."):
        raise SecurityError(
            f"name: {name!r} is refused: it is the name of a folder, and no path; "
            "letters, digits, . _ + -"
        )


def _resolved(config: DictConfig) -> dict[str, Any]:
    """What Hydra itself will act on, as it would be in the first job."""
    whole = config.copy()
    parts = ("launcher", "sweeper", "callbacks", *LOGS, "output_subdir", "run", "sweep")
    with open_dict(whole):
        _refuse_variables(whole)
        whole.hydra.job.num = 0
        whole.hydra.job.id = "0"
    try:
        with open_dict(whole):
            whole.hydra.runtime.output_dir = str(whole.hydra.run.dir)
        found: dict[str, Any] = {}
        for part in parts:
            node = whole.hydra._get_node(part)
            if OmegaConf.is_missing(whole.hydra, part) or node is None:
                continue
            value = whole.hydra[part]
            plain = OmegaConf.is_config(value)
            found[part] = OmegaConf.to_container(value, resolve=True) if plain else value
        found["name"] = OmegaConf.select(whole, "hydra.job.name")
        found["choices"] = OmegaConf.to_container(whole.hydra.runtime.choices)
    except OmegaConfBaseException as error:
        key = error.full_key or "hydra"
        raise ConfigError(str(key), " ".join(str(error).split())) from error
    return found


def _refuse_variables(config: DictConfig) -> None:
    for name in ("env_set", "env_copy"):
        key = f"hydra.job.{name}"
        if OmegaConf.to_container(config.hydra.job, resolve=False).get(name):  # type: ignore[union-attr]
            raise SecurityError(f"{key}: is refused: {REFUSED[key]}")


def _check_hydra(hydra: Mapping[str, Any], said: Said) -> None:
    names = said.security.names
    for part, kind, known in PLUGINS:
        key, node = f"hydra.{part}", hydra.get(part)
        check_plugin(node, key, kind, names)
        default = default_of(f"hydra/{part}", hydra["choices"].get(f"hydra/{part}"))
        for name, value in (node or {}).items():
            usual = name in known or value is None or default.get(name, ...) == value
            if not usual and not said.has(f"{key}.{name}"):
                raise SecurityError(
                    f"{key}.{name}: is refused in a config file: it could be a command or an "
                    f"address; if you mean it, type {key}.{name}=…"
                )
    check_callbacks(hydra.get("callbacks"), names)
    for part in LOGS:
        check_logging(hydra.get(part), f"hydra.{part}", said.off)


def _check_places(hydra: Mapping[str, Any], said: Said) -> None:
    """Folders and files that Hydra makes; under strict those that were typed as well."""
    run, sweep = hydra["run"]["dir"], hydra["sweep"]["dir"]
    subdir, saved = hydra["sweep"].get("subdir", ""), hydra.get("output_subdir")
    places = {
        "hydra.run.dir": run,
        "hydra.sweep.dir": sweep,
        "hydra.sweep.subdir": f"{sweep}/{subdir}",
    }
    if saved is not None:
        places["hydra.output_subdir"] = f"{run}/{saved}"
    for part in ("launcher", *LOGS):
        for key, value in leaves(hydra.get(part), f"hydra.{part}"):
            if key.rpartition(".")[2] in WRITES and value is not None:
                places[key] = value
    allowed = tuple(_typed_roots(said))
    for key, value in places.items():
        check_place(key, value, allowed)
    name = hydra["name"]
    if name is not None and not NAME.fullmatch(str(name).replace("-", "_")):
        raise SecurityError(f"hydra.job.name: {name!r} is refused: it is part of a file's name")


def _typed_roots(said: Said) -> list[Any]:
    """Folders that somebody typed: their own decision, but not under strict."""
    if said.strict:
        return []
    found = []
    for key, value in said.values.items():
        if key.startswith("hydra.") and isinstance(value, str) and key.count("."):
            last = key.rpartition(".")[2]
            if last in ("dir", *WRITES):
                found.append(typed_place(value))
    return [one for one in found if one is not None and one != one.parent]  # never all there is


def _check_params(sweeper: Any, said: Said) -> None:
    """`hydra.sweeper.params`: a file's overrides, which a job would take for typed ones."""
    params = sweeper.get("params") if isinstance(sweeper, dict) else None
    if not isinstance(params, dict):
        return
    texts = [f"{name}={value}" for name, value in params.items()]
    check_text(texts)
    parsed = []
    for name, text in zip(params, texts, strict=True):
        one = parse(text)
        if one is None:
            raise ConfigError("hydra.sweeper.params", f"{text} cannot be read")
        key = one.key_or_group.lstrip("+~")
        packages = [key, one.package or ""]
        closed = ("security", "hydra")
        if any(place.replace("/", ".").split(".")[0] in closed for place in packages):
            if not said.has(f"hydra.sweeper.params.{name}"):
                raise SecurityError(
                    f"hydra.sweeper.params: {key} is refused: a config file cannot type for you"
                )
        parsed.append(one)
    check_jobs(parsed, "hydra.sweeper.params")


def _check_arms(config: DictConfig, said: Said) -> None:
    """`benchmark.arms`: the same."""
    arms = OmegaConf.select(config, "benchmark.arms")
    if arms is None or said.has("benchmark.arms"):
        return
    listed = OmegaConf.to_container(arms, resolve=True)
    for text in listed if isinstance(listed, list) else ():
        if len(str(text)) > bounds.TEXT:
            raise SecurityError("benchmark.arms: is longer than any arm is")
        for word in str(text).replace("'", " ").replace('"', " ").split():
            key = word.lstrip("+~").partition("=")[0]
            if any(k.replace("/", ".").split(".")[0] == "security" for k in key.split("@")):
                raise SecurityError(
                    f"benchmark.arms: {word} is refused: a config file cannot type for you"
                )
