"""job=verify: whether techniques leave the numbers right, and a resumed run continues exactly."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.config import RunConfig
from runner.errors import NotVerified, StorageError
from runner.jobs.config import VerifyKind
from runner.parity.candidates import without_techniques
from runner.parity.continuation import STEPS, Continuation, continuation
from runner.parity.parity import Agreement, Parity, ParityRow
from runner.parity.reference import check_parity
from runner.record.console import plain_text, print_stdout
from runner.record.storage import replace_text
from runner.record.text import json_value

STYLES = {Agreement.exact: "green", Agreement.explained: "green", Agreement.fail: "bold red"}


def main(config: RunConfig, folder: Path) -> Parity | Continuation:
    """Print the result and write `verify.json`; NotVerified where numbers or resume are wrong."""
    result: Parity | Continuation
    verify = config.verify
    if config.optimization.level == "auto":
        from runner.benchmark.auto.resolve import resolve_config

        config = resolve_config(config, folder)
    if verify.what is VerifyKind.parity:
        plain = without_techniques(config)
        result = check_parity(config, plain, verify.steps, attribute=verify.attribute)
        screen, failed = show_parity(result), result.verdict is Agreement.fail
        complaint = _complaint(result)
    else:
        result = continuation(config, folder, verify.steps or STEPS)
        screen, failed = show_continuation(result), not result.exact
        complaint = f"resume: not exact: {', '.join(result.differing[:3])}"
    path = folder / "verify.json"
    try:
        replace_text(path, json.dumps(as_dict(verify.what, result), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    print_stdout(screen)
    print_stdout("", f"as JSON: {path}", soft_wrap=True)
    if failed:
        raise NotVerified(complaint)
    return result


def _complaint(result: Parity) -> str:
    culprits = " with ".join(f"optimization.{name}" for name in result.culprits) or "optimization"
    if result.first is None:
        return culprits
    return f"parity: {culprits}: {result.first}"


def as_dict(what: VerifyKind, result: Parity | Continuation) -> dict[str, Any]:
    """All of it in plain values; JSON has no Inf and no NaN, so these are text."""
    verdict = "exact" if isinstance(result, Parity) or result.exact else "FAIL"
    return {"what": what.value, "verdict": verdict, **json_value(asdict(result))}


def show_parity(result: Parity) -> RenderableType:
    """The verdict, and of each kind of tensor the worst; made for 80 columns."""
    lines = [("verdict", result.verdict.value, STYLES[result.verdict])]
    if result.first is not None:
        lines.append(("first", str(result.first), ""))
    if result.culprits:
        apart = result.alone and "FAIL" not in result.alone.values()
        together = " (each passes alone)" if apart and len(result.culprits) > 1 else ""
        lines.append(("culprit", " + ".join(result.culprits) + together, "bold red"))
    lines.append(("techniques", ", ".join(result.techniques) or "none took", ""))
    lines += [("", f"not {name}: {reason}", "") for name, reason in result.refused.items()]
    lines += [("", f"{name} alone: {verdict}", "") for name, verdict in result.alone.items()]
    lines.append(("precision", f"{result.precision}, compared with {result.reference}", ""))
    lines += [("note", note, "") for note in result.notes]
    lines += [("not judged", omission, "") for omission in result.not_judged]
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim", min_width=12)
    about.add_column(ratio=1, overflow="fold")
    for name, value, style in lines:
        about.add_row(plain_text(name), plain_text(value, style))
    title = Text(f"parity over {result.steps} steps", style="bold cyan")
    return Group(title, about, Text(), _worst_of_each_kind(result.rows))


def _worst_of_each_kind(rows: list[ParityRow]) -> Table:
    table = Table("kind", box=None, padding=(0, 1), pad_edge=False)
    for heading in ("tensors", "step", "worst error", "explained"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("in", overflow="fold")
    for kind in dict.fromkeys(row.kind for row in rows):
        group = [row for row in rows if row.kind == kind]
        worst = max(group, key=lambda row: row.error / row.bound if row.bound else row.error)
        style = "" if all(row.within for row in group) else "bold red"
        numbers = f"{worst.step}", f"{worst.error:.1e}", f"{worst.bound:.1e}"
        cells = kind, f"{len(group)}", *numbers, worst.name
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def show_continuation(result: Continuation) -> RenderableType:
    """The verdict, and how much was compared."""
    heading = f"{result.steps} steps at a stretch, and again with a new start after {result.cut}"
    verdict = Text("exact", "green") if result.exact else Text("FAIL", "bold red")
    counts = ", ".join(f"{count} {kind} values" for kind, count in result.compared.items())
    return Group(
        Text(heading, style="bold cyan"),
        Text.assemble("verdict     ", verdict),
        Text(f"compared    {counts}"),
        Text(f"techniques  {', '.join(result.techniques) or 'none'}"),
        *(Text(f"differs     {name}") for name in result.differing[:10]),
    )
