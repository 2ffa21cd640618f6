"""Write the table of host waits in docs/host_waits.md, from comments in the hot path's modules.

A line there that may read the device says `# host sync: why`; one that only looks like it, as it
reads the host's own memory, says `# host sync: none, why` and is not in the table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "host_waits.md"
PATTERNS = (
    *(f"core/train/{name}.py" for name in ("step", "loop", "metrics", "timing")),
    "core/execution/evaluation.py",
    *(f"core/{name}.py" for name in ("optim/*", "stability/*", "hooks/*", "checks/batch*")),
    *(f"scale/distributed/{name}.py" for name in ("world", "parallel", "sharded", "batchnorm")),
)
READS = {"item", "tolist", "cpu", "nonzero", "synchronize"}
CASTS = {"float", "int", "bool"}
WAIT = "# host sync: "
START, END = "<!-- host waits -->\n", "<!-- end of host waits -->\n"
HEAD = "| where | why |\n|---|---|\n"


def hot_files() -> list[Path]:
    """The modules that run during a step, or between steps."""
    return [file for pattern in PATTERNS for file in sorted((ROOT / "runner").glob(pattern))]


def may_read(node: ast.AST) -> bool:
    """Whether it is a call that reads or writes a device's memory if its operand is there."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute):
        return called.attr in READS or ast.unparse(called) == "torch.tensor"
    casts = isinstance(called, ast.Name) and called.id in CASTS
    return casts and any(not isinstance(argument, ast.Constant) for argument in node.args)


def reason(lines: list[str], number: int) -> str:
    """The reason behind line `number`, or in the comment right above it; "" if there is none."""
    above = lines[number - 2].strip() if number > 1 else ""
    own = lines[number - 1].partition(WAIT)[2]
    return (own or (above if above.startswith("#") else "").partition(WAIT)[2]).strip()


def undocumented(text: str) -> list[int]:
    """The numbers of the lines that may read the device and do not say why."""
    lines = text.splitlines()
    numbers = {node.lineno for node in ast.walk(ast.parse(text)) if may_read(node)}
    return [n for n in sorted(numbers) if not reason(lines, n)]


def waits(file: Path) -> Iterator[tuple[str, str]]:
    """The function and the reason of each documented wait."""
    text = file.read_text()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    for number, line in enumerate(text.splitlines(), 1):
        why = line.partition(WAIT)[2].strip()
        if why and not why.startswith("none"):
            around = [f for f in functions if f.lineno <= number <= (f.end_lineno or 0)]
            yield max(around, key=lambda f: f.lineno).name, why


def table() -> str:
    """The table in Markdown."""
    rows = [
        f"| `{file.parent.name}.{file.stem}.{function}` | {why} |\n"
        for file in hot_files()
        for function, why in waits(file)
    ]
    return HEAD + "".join(rows)


def page() -> str:
    """docs/host_waits.md with the current table."""
    before, _, rest = TARGET.read_text().partition(START)
    return before + START + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    TARGET.write_text(page())
