"""Run a notebook's cells in the current folder without Jupyter, and store their outputs in it.

    python scripts/run_notebook.py examples/first_steps.ipynb

An output is what the cell prints (of a line that is rewritten its last state), and the value of
its last expression as text and, where the object has it, as HTML.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("JPY_PARENT_PID", "1")  # as Jupyter's kernels set it


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute a cell; return its outputs as nbformat 4 has them."""
    tree, value = ast.parse(source), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        exec(compile(tree, "<cell>", "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # noqa: S307
    lines = [line.rpartition("\r")[2] for line in printed.getvalue().splitlines(keepends=True)]
    outputs: list[dict[str, Any]] = []
    if lines:
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        html = getattr(value, "_repr_html_", lambda: None)()
        if html:
            data = {"text/html": html.splitlines(keepends=True)}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def run_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of all its cells, in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count = sum(one["cell_type"] == "code" for one in cells) + 1
            outputs = run_cell("".join(cell["source"]), names)
            cell = {**cell, "outputs": outputs, "execution_count": count}
        cells.append(cell)
    return {**notebook, "cells": cells}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    filled = run_notebook(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(filled, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
