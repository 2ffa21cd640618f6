"""Write docs/api.md: the public names with their signatures and docstrings."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import runner
from runner.core.interfaces.hook import Evaluation, Report, Step
from runner.core.interfaces.objective import Objective
from runner.core.interfaces.run import Run

TARGET = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """\
# Python interface

Written by `python scripts/api_docs.py` from the docstrings; do not edit. All names are of `runner`;
the errors that they raise are in `runner.errors`.
"""
MOST_FIELDS = 12  # of a dataclass; more are counted
RUN_FIELDS = {  # what a hook of a user's needs of a run
    "model": "the model", "device.torch": "its torch.device", "progress.step": "steps done",
    "total_steps": "steps planned", "update.optimizer": "the torch optimizer",
    "progress.metrics": "those of the last validation", "folder": "the run's; None: not recorded",
    "history": "its `add` records a fault", "stop_reason": "set it before `Verdict.STOP`",
}  # fmt: skip
HOOKS = """\
## What hooks get

`Step`, `Report` and `Evaluation` are of `runner.core.interfaces.hook`. Of a `Run`, beside `log`:
"""
OBJECTIVE = "## Objective\n\nOf `runner.objectives.base`. {}\n"


def signature(function: Any) -> str:
    """The signature without quotes of annotations, defaults that are objects as an ellipsis."""
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(…)"
    text = re.sub(r": '([^']*)'", r": \1", text)
    text = re.sub(r"-> '([^']*)'", r"-> \1", text)
    text = re.sub(r"<[^<>]*(<[^<>]*>)?[^<>]*>", "…", text)
    return re.sub(r"\(self(, )?", "(", text)


def section(name: str, code: str, text: str | None, *rest: str) -> str:
    """A name's heading, signature and docstring as Markdown; doctests as a block."""
    wrapped = wrap(code, "    ")
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    blocks = [f"```python\n{p}\n```" if p.startswith(">>>") else p for p in paragraphs]
    parts = [f"## {name}", f"```python\n{wrapped}\n```", *blocks, *rest]
    return "\n\n".join(filter(None, parts)) + "\n"


def wrap(text: str, indent: str) -> str:
    """The text in lines of 100 columns."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 100, subsequent_indent=indent, **options)  # type: ignore[arg-type]


def members(cls: type) -> str:
    """A line for each public method and property of a class and of its bases of ours."""
    lines: dict[str, str] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if name.startswith("_") or name in lines or not base.__module__.startswith("runner."):
                continue
            is_property = isinstance(value, property)
            function = value.fget if is_property else getattr(value, "__func__", value)
            if not inspect.isfunction(function) or not function.__doc__:
                continue
            first = " ".join(re.split(r"\n\s*\n", inspect.cleandoc(function.__doc__))[0].split())
            call = f"{name}{'' if is_property else signature(function)}"
            lines[name] = wrap(f"- `{call}`: {first}", "  ")
    return "\n".join(lines.values())


def entry(name: str) -> str:
    """The part about a name."""
    value = getattr(runner, name)
    if not callable(value):
        cls = type(value)
        return section(name, f"{name}: {cls.__name__}", cls.__doc__, members(cls))
    if not isinstance(value, type):
        return section(name, f"{name}{signature(value)}", value.__doc__)
    if issubclass(value, enum.Enum):
        lines = [f"- `{name}.{each.name}` = {each.value}" for each in value]
        return section(name, f"class {name}", value.__doc__, "\n".join(lines))
    if is_dataclass(value) and len(fields(value)) > MOST_FIELDS:
        names = wrap(f"Fields: {', '.join(f'`{field.name}`' for field in fields(value))}", "")
        return section(name, f"class {name}", value.__doc__, names, members(value))
    code = f"{name}{signature(value)}".removesuffix(" -> None")
    return section(name, code, value.__doc__, members(value))


def field_lines(cls: type) -> str:
    """The class and its docstring, and a line for each field with the comment beside it."""
    lines = [f"`{cls.__name__}`: {inspect.cleandoc(cls.__doc__ or '')}", ""]
    for line in inspect.getsource(cls).splitlines():
        if found := re.fullmatch(r"    (\w+: [^#=]+?)(?: = [^#]+?)?(?:  # (.+))?", line):
            lines.append(wrap(f"- `{found[1]}`" + (f": {found[2]}" if found[2] else ""), "  "))
    return "\n".join(lines) + "\n"


def objects_of_hooks() -> str:
    """The part about what hooks and objectives get and inherit."""
    known = {field.name for field in fields(Run)} | {*dir(Run)}
    if gone := {name.partition(".")[0] for name in RUN_FIELDS} - known:
        raise ValueError(f"Run has no {gone}")
    lines = [f"- `run.{name}`: {text}" for name, text in RUN_FIELDS.items()]
    parts = [HOOKS, "\n".join(lines) + "\n", *map(field_lines, (Step, Report, Evaluation))]
    summary = inspect.cleandoc(Objective.__doc__ or "")
    return "\n".join([*parts, OBJECTIVE.format(summary), members(Objective) + "\n"])


def document() -> str:
    """The whole page."""
    names = sorted(set(runner.__all__) - {"__version__"}, key=str.lower)
    return "\n".join([HEAD, *map(entry, names), objects_of_hooks()])


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
