"""Config files of other folders, looked at as YAML before anything is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.errors import ConfigError, SecurityError
from runner.record.hydra_files import NO_VALUE
from runner.security.intent import bounds
from runner.security.intent.names import check_any

PLAIN = {"str", "int", "float", "bool", "null", "map", "seq"}
PLAIN_TAGS = {None, "!", *(f"tag:yaml.org,2002:{name}" for name in PLAIN)}
NUMBERS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool")}
VARIABLES = ("env_set", "env_copy")


@dataclass
class _Level:
    """A mapping or a list that is being read."""

    mapping: bool
    anchor: str | None
    key: str | None = None  # of the value that comes next; None: a key comes next
    nodes: int = 1
    text: int = 0


def look(text: str, where: str, trusted: Sequence[str]) -> None:
    """Raise SecurityError for what no config file may hold; what is no YAML is for others to say.

    Events come one by one, so that neither depth nor aliases cost more than the file's length.
    """
    levels = [_Level(False, None)]
    anchors: dict[str, tuple[int, int]] = {}
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            _step(event, levels, anchors, where, trusted)
    except yaml.YAMLError:
        return


def check_values(text: str, where: str) -> None:
    """Raise ConfigError for the first value that is not of the type it is tagged with.

    A number may be tagged by its looks alone (`0x_`). PyYAML's own errors name neither value nor
    line.
    """
    loader = yaml.SafeLoader(text)
    nodes = [loader.get_single_node()]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            nodes += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            nodes += reversed(node.value)
        elif node.tag in NUMBERS:
            try:
                loader.construct_object(node)
            except NO_VALUE as error:
                kind = node.tag.rpartition(":")[2]
                raise ConfigError(
                    f"{where}:{node.start_mark.line + 1}",
                    f"{node.value[:40]!r} cannot be read as {kind}", "mend that value",
                ) from error  # fmt: skip


def _step(
    event: Any,
    levels: list[_Level],
    anchors: dict[str, tuple[int, int]],
    where: str,
    trusted: Sequence[str],
) -> None:
    here = f"{where}:{event.start_mark.line + 1}"
    if getattr(event, "tag", None) not in PLAIN_TAGS:
        raise SecurityError(
            f"{here}: the tag {event.tag!r} is refused: it could make any object; "
            "write the value without it"
        )
    if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
        if len(levels) > bounds.DEPTH:
            raise SecurityError(f"{here}: is nested deeper than {bounds.DEPTH}; make it flat")
        levels.append(_Level(isinstance(event, yaml.MappingStartEvent), event.anchor))
    elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
        done = levels.pop()
        if done.anchor is not None:
            anchors[done.anchor] = done.nodes, done.text
        _add(levels, done.nodes, done.text, None, here)
    elif isinstance(event, yaml.AliasEvent):
        if levels[-1].mapping and levels[-1].key is None:
            raise SecurityError(f"{here}: *{event.anchor} is refused: write the key itself")
        if event.anchor not in anchors:
            raise SecurityError(f"{here}: *{event.anchor} refers to itself, or to nothing")
        _add(levels, *anchors[event.anchor], None, here)
    elif isinstance(event, yaml.ScalarEvent):
        if event.anchor is not None:
            anchors[event.anchor] = 1, len(event.value)
        _check_value(event.value, levels, here, trusted)
        _add(levels, 1, len(event.value), event.value, here)


def _add(levels: list[_Level], nodes: int, text: int, scalar: str | None, here: str) -> None:
    level = levels[-1]
    level.nodes, level.text = level.nodes + nodes, level.text + text
    if level.nodes > bounds.NODES or level.text > bounds.EXPANDED_TEXT:
        raise SecurityError(
            f"{here}: grows beyond {bounds.NODES} values or {bounds.EXPANDED_TEXT} characters, "
            "each counted as often as an alias repeats it; write it without them"
        )
    if level.mapping:
        level.key = (scalar or "") if level.key is None else None


def _check_value(value: str, levels: list[_Level], here: str, trusted: Sequence[str]) -> None:
    if len(value) > bounds.TEXT or value.count("${") > bounds.REFERENCES:
        raise SecurityError(f"{here}: a value of {len(value)} characters is no setting")
    level = levels[-1]
    path = [one.key for one in levels if one.key is not None]
    if level.mapping and level.key is None:  # a key
        if value in VARIABLES and (not path or path[-1] == "job"):
            raise SecurityError(
                f"{here}: {value} is refused: a config sets and reads no variables of processes; "
                "set them where you start the runner"
            )
        if value == "searchpath":
            raise SecurityError(
                f"{here}: searchpath is refused: a config file brings no other folders along; "
                "type hydra.searchpath=[file://FOLDER], or --config-dir=FOLDER"
            )
        return
    if path == ["hydra"] and "${" in value:
        raise SecurityError(f"{here}: hydra is refused: it stands for another value")
    if path and path[-1] == "_target_" and value not in ("", "null", "~") and "${" not in value:
        check_any(value, f"{here} _target_", trusted)
