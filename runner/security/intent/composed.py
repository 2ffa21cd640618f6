"""A composed config, before anything in it is made, called, or written to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityConfig as Security
from runner.security.intent import bounds
from runner.security.intent.formats import check_shown
from runner.security.intent.keys import OF_LAUNCHERS, OF_SWEEPERS, REFUSED, default_of
from runner.security.intent.levels import check_security
from runner.security.intent.logs import check_logs
from runner.security.intent.names import (
    FACTORIES,
    NAMED,
    check_callbacks,
    check_plugin,
)
from runner.security.intent.said import Said, check_jobs, check_text, parse
from runner.security.intent.settled import CALLED, in_a_job
from runner.security.intent.steady import Steady, below
from runner.security.intent.written import GONE_ON_WITH, check_places, check_resumed
from runner.security.secrets import resolved
from runner.security.targets import permit

PLUGINS = (("launcher", Launcher, OF_LAUNCHERS), ("sweeper", Sweeper, OF_SWEEPERS))
CALLS = ("_target_", *FACTORIES, *NAMED)
ACTED_ON = (*CALLED, "run", "sweep", "output_subdir", "job.name")
CLOSED = ("security", "hydra")
"""Groups that a file's overrides leave alone."""


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
    steady.check(*(key for key in GONE_ON_WITH if not said.has(key)))
    _check_name(config)
    hydra = in_a_job(config, tree["hydra"], "run")
    _check_hydra(hydra, tree["hydra"], said)
    for written in (hydra, in_a_job(config, tree["hydra"], "sweep")):
        check_places(written, said)
        check_logs(written, said)
    check_resumed(config, said)
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
        if not said.has(f"hydra.sweeper.params.{name}"):
            check_shown(text, f"hydra.sweeper.params.{name}")  # Hydra prints it as it is
            if _is_closed(one):
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
