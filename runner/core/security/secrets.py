"""Control which environment variables a config may read, and mask their values in output.

`${oc.env:NAME}` reads a variable only if the typed `security.environment` names it; a config file
cannot permit itself. The value exists only in memory: files, logs and console show
`${oc.env:NAME}`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from runner.core import masking
from runner.core.errors import ConfigError, RunnerError, SecurityError
from runner.core.masking import add_secret, known_secrets, mask_secrets, reference_to
from runner.core.record.storage import read_record, replace_text

KEY = "security.environment"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass
class EnvironmentAccess:
    """The variables that a config may read; `names=None`: all, under security=off."""

    names: frozenset[str] | None = frozenset()
    show_names: bool = False  # the config is only printed, with names in place of values
    reads: int = 0


_access: EnvironmentAccess | None = None
_values: dict[str, str] = {}  # values read by a config, of any length → variable name
_masked_by_key: dict[str, tuple[str, str]] = {}  # config key → (value as text, masked text)


@contextmanager
def environment_access(names: Sequence[str] | None, show_names: bool = False) -> Iterator[None]:
    """While entered, a config may read only the variables `names`; None: any.

    Refusals are raised as SecurityError or ConfigError, unwrapped from OmegaConf's error.
    """
    global _access
    for name in names or ():
        if not NAME.fullmatch(name):
            raise ConfigError(KEY, f"{name!r} is not a variable name", "letters, digits, _")
        if (value := os.environ.get(name)) is not None:
            add_secret(name, value)  # the user's code may read it as well
    allowed = None if names is None else frozenset(names)
    previous, _access = _access, EnvironmentAccess(allowed, show_names)
    try:
        yield
    except OmegaConfBaseException as error:
        raise find_refusal(error) or error from None
    finally:
        _access = previous


def current_environment_access(names: Sequence[str]) -> AbstractContextManager[None]:
    """Keep the access in force; if there is none, allow these variables."""
    return environment_access(names) if _access is None else nullcontext()


def permitted_variables() -> list[str] | None:
    """Return the variable names that may be read now; None: any."""
    if _access is None:
        return []
    return None if _access.names is None else sorted(_access.names)


def find_refusal(error: BaseException) -> SecurityError | ConfigError | None:
    """Return the SecurityError or ConfigError in the error's cause chain, if any."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, SecurityError | ConfigError):
            return inner
        seen.add(id(inner))
        inner = inner.__cause__ or inner.__context__
    return None


# -- reading -----------------------------------------------------------------------------------


def install_resolvers() -> None:
    """Replace OmegaConf's resolvers; without an access in force they behave as before."""
    for name, resolver in (("oc.env", _env), ("oc.decode", _decode), ("oc.create", _create)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _env(name: Any, *default: Any, _node_: Any) -> Any:
    if _access is None:
        return oc.env(name, *default)
    key = (_node_._get_full_key(None) or "config").replace("_dummy_", "defaults")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SecurityError(f"{key}: {name!r} is refused: it is not a variable name")
    if _access.names is not None and name not in _access.names:
        problem = f"{key}: {reference_to(name)} is refused: {KEY} does not list {name}"
        raise SecurityError(f"{problem}; to let the config read it, type {KEY}=[{name}]")
    _access.reads += 1
    value = os.environ.get(name)
    if value is None:
        if default:
            return None if default[0] is None else str(default[0])
        raise ConfigError(key, f"the environment variable {name} is not set", f"set {name}")
    add_secret(name, value)
    _values[value] = name
    if _access.show_names and _node_._metadata.ref_type in (Any, str):
        return reference_to(name)
    return value


def _decode(expr: Any, _parent_: Any, _node_: Any) -> Any:
    return oc.decode(_without_secret(expr, "oc.decode", _node_), _parent_=_parent_, _node_=_node_)


def _create(obj: Any, _parent_: Any, _node_: Any) -> Any:
    return oc.create(_without_secret(obj, "oc.create", _node_), _parent_=_parent_)


def _without_secret(source: Any, resolver: str, node: Any) -> Any:
    """Return what may be parsed: parts of a secret value would be secret, but not recognised."""
    if _access is not None:
        for value, name in _values.items():
            if value and value in str(source):
                problem = f"{node._get_full_key(None)}: {resolver} of {reference_to(name)}"
                raise SecurityError(f"{problem} is refused; use one variable for each value")
    return source


# -- folders -----------------------------------------------------------------------------------


def read_path(config: DictConfig, key: str) -> Path:
    """Return the path of a key.

    Raises SecurityError if it has a variable's value, ConfigError if it cannot be resolved.
    """
    reads_before = _access.reads if _access is not None else 0
    try:
        value: Any = config
        for part in key.split("."):
            value = value[part]
    except OmegaConfBaseException as error:
        if refusal := find_refusal(error):
            raise refusal from None
        from runner.core.security.interpolations import failed_interpolation

        cause, error = failed_interpolation(config) or (str(error.full_key or key), error)
        raise ConfigError(cause, str(error).partition("\n")[0]) from error
    has_read = _access is not None and _access.reads > reads_before
    path = Path(str(value))
    inner = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    # a variable may hold a folder, such as HOME, in which an absolute path lies
    for text in inner.parts if inner.is_absolute() else [str(inner)]:
        check_name(key, text, f"type a name: name=…, or {key}=…", has_read)
    return path


def check_name(key: str, text: str, fix: str, has_read: bool = False) -> None:
    """Raise SecurityError if a text that names files has a variable's value, read or typed."""
    values = (value for name, (value, _) in _masked_by_key.items() if f"{name}.".startswith(key))
    if has_read or mask_secrets(text) != text or text in values:
        problem = "would put a value from the environment into a file or folder name"
        raise SecurityError(f"{key}: {problem}; {fix}")


# -- writing -----------------------------------------------------------------------------------


def record_secret_keys(config: DictConfig) -> None:
    """Record which keys of a composed config contain an environment value."""
    if _access is not None and _values:
        _record_keys(config, "", _access)


def _record_keys(node: Any, parent_key: str, access: EnvironmentAccess) -> None:
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        if OmegaConf.is_missing(node, key):
            continue
        reads_before, child_key = access.reads, f"{parent_key}.{key}" if parent_key else str(key)
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            _record_keys(value, child_key, access)
        elif value is not None and access.reads > reads_before:
            text = _to_text(value)
            _masked_by_key[child_key] = (text, _mask_text(text))


def _to_text(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)


def _mask_text(text: str) -> str:
    """Replace every environment value in the text, even short ones, by its reference."""
    parts = "|".join(re.escape(v) for v in sorted(_values, key=len, reverse=True) if v)
    masked_text = re.sub(parts, lambda match: reference_to(_values[match[0]]), text)
    if masked_text == text:  # a number or boolean, formatted differently than it was read
        names = sorted(n for v, n in _values.items() if v.strip().casefold() == text.casefold())
        masked_text = reference_to(names[0]) if names else mask_secrets(text)
    return masked_text


def mask_config(tree: Any, key: str = "") -> Any:
    """Return a config, before it is written, with environment values as `${oc.env:NAME}`."""
    if not _masked_by_key:
        return tree
    if isinstance(tree, Mapping):
        prefix = f"{key}." if key else ""
        return {name: mask_config(item, f"{prefix}{name}") for name, item in tree.items()}
    if isinstance(tree, list):
        return [mask_config(item, f"{key}.{i}") for i, item in enumerate(tree)]
    value, masked_text = _masked_by_key.get(key, ("", ""))
    if key in _masked_by_key and tree is not None and _to_text(tree) == value:
        return masked_text
    return mask_secrets(tree) if isinstance(tree, str) else tree


def mask_hydra_files(folder: Path) -> None:
    """Mask the YAML files saved by Hydra, which resolves some values itself."""
    for path in folder.glob("*.yaml") if known_secrets() else ():
        text = read_record(path).decode("utf-8", "replace")
        if mask_secrets(text) != text:
            replace_text(path, text)


def masking_state() -> tuple[Any, ...]:
    """Return the arguments of `adopt_masking_state` for another process."""
    return known_secrets(), dict(_masked_by_key), dict(_values)


def adopt_masking_state(
    known: Mapping[str, str], masked_by_key: Mapping[str, tuple[str, str]], values: dict[str, str]
) -> None:
    """Mask what the parent process masks."""
    masking.add_secrets(known)
    _masked_by_key.update(masked_by_key)
    _values.update(values)


@contextmanager
def redact_errors() -> Iterator[None]:
    """Replace environment values, even short ones, in RunnerErrors raised within."""
    try:
        yield
    except RunnerError as error:
        error.args = (mask_words(str(error)),)
        raise


def mask_words(text: str) -> str:
    """Replace each word of the text that is an environment value by `${oc.env:NAME}`."""
    values = sorted((v for v in _values if v.strip()), key=len, reverse=True)
    words = [rf"(?<![A-Za-z0-9_]){re.escape(value)}(?![A-Za-z0-9_])" for value in values]

    def replacement(match: re.Match[str]) -> str:
        return reference_to(_values[match[0]]) if match[0] in _values else match[0]

    return re.sub("|".join([masking.REFERENCE.pattern, *words]), replacement, mask_secrets(text))
