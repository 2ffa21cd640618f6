"""A composed config, before anything in it is made, called, or written to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityConfig as Security
from runner.security.intent import bounds
from runner.security.intent.keys import OF_LAUNCHERS, OF_SWEEPERS, REFUSED, default_of
from runner.security.intent.levels import check_security
from runner.security.intent.names import (
    FACTORIES,
    NAMED,
    check_callbacks,
    check_logging,
    check_plugin,
    leaves,
)
from runner.security.intent.places import check_place, typed_place
from runner.security.intent.said import Said, check_jobs, check_text, parse
from runner.security.intent.steady import Steady, below
from runner.security.secrets import resolved, shows
from runner.security.targets import NAME, permit

PLUGINS = (("launcher", Launcher, OF_LAUNCHERS), ("sweeper", Sweeper, OF_SWEEPERS))
LOGS = ("job_logging", "hydra_logging")
CALLED = ("launcher", "sweeper", "callbacks", *LOGS)
CALLS = ("_target_", *FACTORIES, *NAMED)
ACTED_ON = (*CALLED, "run", "sweep", "output_subdir", "job.name")
CLOSED = ("security", "hydra")
"""Groups that a file's overrides leave alone."""
GONE_ON_WITH = ("checkpoint.resume", "replay.path")
RESUMES = ("checkpoint.resume", "sweep.resume")
"""Keys that say where to write, when they are typed: the run or sweep goes on in place."""
SHOWN = (("output_subdir",), ("job", "name"), ("sweep", "subdir"))  # names of folders and files
WRITES = ("filename", "submitit_folder", "temp_folder", "mmap_folder")


def check_composed(config: DictConfig, said: Said, typed: Security) -> None:
    """Raise SecurityError for what a config may not ask for; `config` has Hydra's own part too.

    What was typed may be more than what a file may say; `typed` is what these very overrides say
    about security. What leads nowhere is passed over: Hydra cannot make anything of it either.
    """
    check_security(config, typed)
    tree: Any = OmegaConf.to_container(config, resolve=False)
    _check_names(tree, said)
    if "hydra" not in tree:
        return
    _check_nodes(tree["hydra"], said)
    steady = Steady(tree)
    steady.check("name", *(f"hydra.{key}" for key in ACTED_ON))
    _check_name(config)
    hydra = _resolved(config, tree["hydra"])
    _check_hydra(hydra, tree["hydra"], said)
    _check_places(hydra, said)
    _check_resumed(config, said)
    _check_params(hydra.get("sweeper"), said)
    _check_arms(tree, said)


def _check_names(tree: Any, said: Said) -> None:
    """Every `_target_` of the run's own part, wherever it stands."""
    names = said.security.names
    for where, value in below({k: v for k, v in tree.items() if k != "hydra"}, ()):
        if where[-1] == "_target_" and value not in (None, "", "???"):
            key = ".".join(map(str, where))
            _check_literal(key, value, said)
            permit(str(value), key, names)


def _check_literal(key: str, value: object, said: Said) -> None:
    """What is called is written out: anything else could come to something else later."""
    if isinstance(value, str) and "${" in value and not said.off:
        raise SecurityError(
            f"{key}: {value} is refused: it stands for another value; write the name itself"
        )


def _check_name(config: DictConfig) -> None:
    """Part of the run's folder, which is made before anybody looks at the rest."""
    try:
        found, told = resolved(config, ["name"])
    except OmegaConfBaseException:  # what it refers to is for the check of the whole config
        return
    name = str(found)
    if any(letter in name for letter in "/\\\0") or name in (".", ".."):
        raise SecurityError(
            f"name: {told or name!r} is refused: it is the name of a folder, and no path; "
            "letters, digits, . _ + -"
        )


def _check_nodes(hydra: Any, said: Said) -> None:
    """What Hydra makes and fills in, as it is written."""
    for part in ("", "run", "sweep", "job", "runtime", "overrides", *CALLED):
        node = hydra.get(part) if part else hydra
        if isinstance(node, str) and node != "???":
            raise SecurityError(f"hydra.{part}: is refused: it stands for another value")
    for name in ("env_set", "env_copy"):
        if hydra["job"].get(name):
            raise SecurityError(f"hydra.job.{name}: is refused: {REFUSED[f'hydra.job.{name}']}")
    for key, value in (
        ("hydra.job.num", hydra["job"].get("num")),
        ("hydra.job.id", hydra["job"].get("id")),
        ("hydra.runtime.output_dir", hydra["runtime"].get("output_dir")),
    ):
        if value not in (None, "???") and not said.has(key):
            raise SecurityError(f"{key}: is refused: Hydra fills it in itself")
    for part in CALLED:
        for where, value in below(hydra.get(part), ("hydra", part)):
            if where[-1] in CALLS:
                _check_literal(".".join(map(str, where)), value, said)


def check_leads(config: DictConfig) -> None:
    """Raise ConfigError where what Hydra will act on cannot be resolved."""
    tree: Any = OmegaConf.to_container(config, resolve=False)
    _resolved(config, tree["hydra"], complete=True)


def _resolved(config: DictConfig, hydra: Any, complete: bool = False) -> dict[str, Any]:
    """What Hydra itself will act on, as it would be in the first job."""
    found: dict[str, Any] = {"choices": hydra["runtime"].get("choices") or {}}
    with _as_in_a_job(config, hydra):
        for part in (*CALLED, "output_subdir", "run", "sweep"):
            found[part] = _settled(hydra.get(part), ("hydra", part), config, complete)
        found["name"] = _value(config, ("hydra", "job", "name"), complete)
    return found


@contextmanager
def _as_in_a_job(config: DictConfig, hydra: Any) -> Iterator[None]:
    """While entered, the config has what Hydra fills in; a copy of it would take far longer."""
    job, runtime = config.hydra.job, config.hydra.runtime
    with open_dict(config):
        job.num, job.id = 0, "0"
        runtime.output_dir = _value(config, ("hydra", "run", "dir"), False)
        try:
            yield
        finally:
            job.num, job.id = hydra["job"].get("num", "???"), hydra["job"].get("id", "???")
            runtime.output_dir = hydra["runtime"].get("output_dir", "???")


def _settled(raw: Any, path: tuple[Any, ...], whole: DictConfig, complete: bool) -> Any:
    """The same with every reference followed; None for those that lead nowhere."""
    if isinstance(raw, dict):
        return {k: _settled(v, (*path, k), whole, complete) for k, v in raw.items()}
    if isinstance(raw, list):
        return [_settled(v, (*path, n), whole, complete) for n, v in enumerate(raw)]
    if not isinstance(raw, str) or "${" not in raw:
        return None if raw == "???" else raw
    value = _value(whole, path, complete)
    if OmegaConf.is_config(value):
        raise SecurityError(
            f"{'.'.join(map(str, path))}: {raw} is refused: it stands for a whole group of "
            "settings; write them there"
        )
    return value


def _value(whole: DictConfig, path: tuple[Any, ...], complete: bool) -> Any:
    try:
        found, told = resolved(whole, path)
    except OmegaConfBaseException as error:
        if complete:
            key = str(error.full_key or ".".join(map(str, path)))
            raise ConfigError(key, " ".join(str(error).split())) from error
        return None
    if told is not None and (path[-1] in WRITES or path[1:] in SHOWN):
        raise shows(".".join(map(str, path)), told)
    return found


def _check_hydra(hydra: Mapping[str, Any], raw: Any, said: Said) -> None:
    names = said.security.names
    for part, kind, known in PLUGINS:
        key, node = f"hydra.{part}", hydra.get(part)
        check_plugin(node, key, kind, names)
        default = default_of(f"hydra/{part}", hydra["choices"].get(f"hydra/{part}"))
        for name, value in (node or {}).items():
            usual = name in known or value is None or default.get(name, ...) == raw[part][name]
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
    run, sweep = hydra["run"].get("dir"), hydra["sweep"].get("dir")
    subdir, saved = hydra["sweep"].get("subdir"), hydra.get("output_subdir")
    places = {
        "hydra.run.dir": run,
        "hydra.sweep.dir": sweep,
        "hydra.sweep.subdir": Path(sweep) / subdir if sweep and subdir else None,
        "hydra.output_subdir": Path(run) / saved if run and saved else None,
    }
    for part in ("launcher", *LOGS):
        for key, value in leaves(hydra.get(part), f"hydra.{part}"):
            if key.rpartition(".")[2] in WRITES and value is not None:
                places[key] = value
                if ".." in str(value).split("/") and not said.has(key):  # of which folder?
                    raise SecurityError(f"{key}: {value} is refused: it leads up; name the folder")
    allowed = tuple(_typed_roots(said))
    for key, value in places.items():
        if value is not None:
            check_place(key, value, allowed, said.strict)
    name = hydra["name"]
    if name is not None and not NAME.fullmatch(str(name).replace("-", "_")):
        raise SecurityError(f"hydra.job.name: {name!r} is refused: it is part of a file's name")


def _check_resumed(config: DictConfig, said: Said) -> None:
    """What a run goes on from or adds to, where a file says so, was written here."""
    for key in GONE_ON_WITH:
        found = _value(config, tuple(key.split(".")), False)
        if found not in (None, "", "None", "none", "auto") and not said.has(key):
            check_place(key, found, tuple(_typed_roots(said)))


def _typed_roots(said: Said) -> list[Any]:
    """Folders that somebody typed: their own decision, but not under strict."""
    if said.strict:
        return []
    found = []
    for key, value in said.values.items():
        if not isinstance(value, str) or "." not in key:
            continue
        last = key.rpartition(".")[2]
        if key.startswith("hydra.") and last in ("dir", *WRITES):
            found.append(typed_place(value))
        elif key in RESUMES and value not in ("none", "auto"):
            place = Path(os.path.realpath(value))  # a run's folder, or one of its checkpoints
            within = (one.parent for one in (place, place.parent) if one.name == "checkpoints")
            found.append(next(within, place))
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
        if _is_closed(one) and not said.has(f"hydra.sweeper.params.{name}"):
            raise SecurityError(
                f"hydra.sweeper.params: {name} is refused: a config file cannot type for you"
            )
        parsed.append(one)
    check_jobs(parsed, "hydra.sweeper.params")


def _check_arms(tree: Any, said: Said) -> None:
    """`benchmark.arms`: the same, as they will be taken apart."""
    arms = (tree.get("benchmark") or {}).get("arms")
    if arms is None or said.has("benchmark.arms"):
        return
    for text in arms if isinstance(arms, list) else [arms]:
        if len(str(text)) > bounds.TEXT or "${" in str(text):
            raise SecurityError("benchmark.arms: is refused: an arm is short, and written out")
        try:
            words = shlex.split(str(text))
        except ValueError as error:
            raise ConfigError("benchmark.arms", f"{text} cannot be read ({error})") from error
        for word in words:
            if (one := parse(word)) is not None and _is_closed(one):
                raise SecurityError(
                    f"benchmark.arms: {word} is refused: a config file cannot type for you"
                )


def _is_closed(override: Override) -> bool:
    places = (override.key_or_group.lstrip("+~"), override.package or "")
    return any(place.replace("/", ".").split(".")[0] in CLOSED for place in places)
