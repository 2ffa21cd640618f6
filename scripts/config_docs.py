"""Write docs/config.md: every key with its type, default, bounds and meaning, from the schema."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from runner.core.bounds import LIMITS
from runner.core.config.run_config import RunConfig
from runner.core.schemas import data as data_config
from runner.core.schemas import models as model_config
from runner.core.schemas.sweep import LauncherConfig

TARGET = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """\
# Config keys

Written by `python scripts/config_docs.py` from the dataclasses of
`runner/core/config/run_config.py`; do not edit.
Type `key=value`; `null` is for "not set".

**The default is that of the schema alone.** The option of each group that `conf/config.yaml` names
(`schedule: cosine`), or that is typed, sets others in `conf/<group>/<option>.yaml`
(`schedule.warmup: 0.05`). `python -m runner --cfg job` prints what a run gets.
"""
COLUMNS = "| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n"


def comments(schema: type) -> dict[str, str]:
    """The comment of each field in the source."""
    texts: dict[str, str] = {}
    for base in reversed([one for one in schema.__mro__ if is_dataclass(one)]):
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                texts[node.target.id] = comment(lines, node)
    return texts


def comment(lines: list[str], node: ast.AnnAssign) -> str:
    """The comment behind a field, on its first line or its last, or else the one above it."""
    last = lines[(node.end_lineno or 1) - 1][node.end_col_offset :]
    first, number = lines[node.lineno - 1], node.lineno - 1
    above: list[str] = []
    while lines[number - 1].strip().startswith("#"):
        number -= 1
        above.insert(0, lines[number].strip(" #"))
    return (last.partition("#")[2] or first.partition("  # ")[2] or " ".join(above)).strip()


def type_name(hint: Any) -> str:
    """A type as people write it; the members of an enum."""
    if get_origin(hint) is UnionType:
        return " or ".join(type_name(one) for one in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{one.name}`" for one in hint)
    names = {NoneType: "null", Any: "any", str: "text", float: "number", bool: "true, false"}
    return names.get(hint) or getattr(hint, "__name__", str(hint))


def made(field: Field[Any]) -> Any:
    """A field's default."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def as_typed(value: Any) -> str:
    """A default as it is typed."""
    if isinstance(value, Enum):
        return f"`{value.name}`"
    words = {None: "null", True: "true", False: "false", "???": "required"}
    known = isinstance(value, str | bool | NoneType) and value in words
    return f"`{words[value] if known else value}`"


def rows(schema: Any, prefix: str, without: Any = None, values: Any = None) -> Iterator[str]:
    """A line of the table for each key but those of `without`; parts of it with their own."""
    hints, texts = get_type_hints(schema), comments(schema)
    shared = {field.name for field in fields(without)} if without is not None else set()
    for field in fields(schema):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        default = made(field) if values is None else getattr(values, field.name)
        if is_dataclass(hint):
            yield from rows(hint, f"{key}.", values=default)
        elif field.name not in shared:
            bounds = [str(field.metadata[name]) for name in ("bounds",) if name in field.metadata]
            bounds += [f"≤ {LIMITS[key]:,}"] if key in LIMITS else []
            cells = (f"`{key}`", type_name(hint), as_typed(default), " and ".join(bounds))
            row = " | ".join(cell.replace("|", "\\|") for cell in (*cells, texts[field.name]))
            yield f"| {row} |\n"


def parts() -> Iterator[tuple[str, Any, str, Any]]:
    """A title, a schema, the prefix of its keys, and a schema whose keys are left out."""
    hints = get_type_hints(RunConfig)
    options = {"data": data_config.OPTIONS, "model": model_config.OPTIONS}
    for field in fields(RunConfig):
        schema = hints[field.name]
        if is_dataclass(schema):
            yield field.name, schema, f"{field.name}.", None
        for name, own in options.get(field.name, {}).items():
            yield f"{field.name}={name}", own, f"{field.name}.", schema
    yield "hydra/launcher=isolated", LauncherConfig, "hydra.launcher.", None


def document() -> str:
    """The whole page."""
    pages = [HEAD, f"## At the top\n\n{COLUMNS}"]
    for field in fields(RunConfig):
        if field.name in ("name", "seed"):
            pages[1] += f"| `{field.name}` | {field.type} | {as_typed(made(field))} | | |\n"
    for title, schema, prefix, without in parts():
        first = re.split(r"\n\s*\n", inspect.getdoc(schema) or "")[0]
        table = "".join(rows(schema, prefix, without))
        table = f"\n{COLUMNS}{table}" if table else ""
        pages.append(f"## {title}\n\n{textwrap.fill(first, 100)}\n{table}")
    return "\n".join(pages)


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
