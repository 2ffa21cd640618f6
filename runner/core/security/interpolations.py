"""Interpolations of a config that fail, and those that a recorded config must not have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from runner.core.errors import SecurityError
from runner.core.masking import REFERENCE

ARGUMENTS = re.compile(r"\w+\.(arguments|options)", re.ASCII)  # mappings that become arguments


def failed_interpolation(config: Any) -> tuple[str, OmegaConfBaseException] | None:
    """Return key and error of the first interpolation that fails by itself, but for `hydra`."""
    failures = dict[str, tuple[str, OmegaConfBaseException]]()  # raw text and error, by key
    _find_failures(config, "", failures)
    computed_last = sorted(failures.items(), key=lambda item: item[1][0].startswith("${runner."))
    for key, (text, error) in computed_last:
        if not any(other in text for other in failures if other != key):
            return key, error
    return None


def _find_failures(
    node: Any, parent_key: str, failures: dict[str, tuple[str, OmegaConfBaseException]]
) -> None:
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node):
        key = f"{parent_key}.{name}" if parent_key else str(name)
        key = f"{parent_key}[{name}]" if isinstance(node, ListConfig) else key
        child = node._get_node(name)
        if key == "hydra" or child is None or child._is_none() or child._is_missing():
            continue
        if child._is_interpolation():
            try:
                node[name]
            except OmegaConfBaseException as error:
                failures[key] = str(child._value()), error
        elif isinstance(child, DictConfig | ListConfig):
            _find_failures(child, key, failures)


def check_literal(value: Any, key: str = "", may_read: Collection[str] | None = ()) -> None:
    """Raise SecurityError if a recorded config contains interpolations or code as a name.

    Names of arguments are identifiers. `${oc.env:NAME}`, a masked value, may be in `may_read`.
    """
    if isinstance(value, Mapping | list | tuple):
        is_call = isinstance(value, Mapping) and ("_target_" in value or ARGUMENTS.fullmatch(key))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            if is_call and not str(name).isidentifier():
                raise SecurityError(f"{key}: {name!r} is refused: a name must be an identifier")
            child_key = f"{key}.{name}" if key else str(name)
            check_literal(name, key, ())
            check_literal(item, child_key, may_read)
    elif isinstance(value, str) and "${" in REFERENCE.sub("", value):  # could be anything
        raise SecurityError(f"{key}: {value!r} is refused: interpolation is not allowed here")
    elif isinstance(value, str) and may_read is not None:
        for name in REFERENCE.findall(value):
            if name not in may_read:
                fix = f"to allow it, add security.environment=[{name}]"
                raise SecurityError(f"{key}: {value!r} is refused: it reads a variable; {fix}")
