"""job=verify: whether techniques leave the numbers right, and a resumed run goes on exactly."""

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
from runner.parity import continuation as resuming
from runner.parity.candidates import without_techniques
from runner.parity.continuation import Continuation, continuation
from runner.parity.parity import Agreement, Parity, Row
from runner.parity.reference import check_parity
from runner.record.console import plain_text, print_stdout
from runner.record.storage import replace_text
from runner.record.text import json_value

STYLES = {Agreement.exact: "green", Agreement.explained: "green", Agreement.fail: "bold red"}


def main(config: RunConfig, folder: Path) -> Parity | Continuation:
    """Print what was found and write `verify.json`; NotVerified where it is not as it should be."""
    found: Parity | Continuation
    if config.optimization.level == "auto":
        from runner.benchmark.auto.resolve import resolve_config

        config = resolve_config(config, folder)
    if config.verify.what is VerifyKind.parity:
        found = _parity(config)
        screen, failed = show_parity(found), found.verdict is Agreement.fail
        complaint = _complaint(found)
    else:
        found = continuation(config, folder, config.verify.steps or resuming.STEPS)
        screen, failed = show_continuation(found), not found.exact
        complaint = f"resume: not exact: {', '.join(found.differing[:3])}"
    path = folder / "verify.json"
    try:
        replace_text(path, json.dumps(as_dict(config.verify.what, found), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    print_stdout(screen)
    print_stdout("", f"as JSON: {path}", soft_wrap=True)
    if failed:
        raise NotVerified(complaint)
    return found


def _parity(config: RunConfig) -> Parity:
    steps, attribute = config.verify.steps, config.verify.attribute
    return check_parity(config, without_techniques(config), steps, attribute=attribute)


def _complaint(found: Parity) -> str:
    culprits = " with ".join(f"optimization.{name}" for name in found.culprits) or "optimization"
    if found.first is None:
        return culprits
    return f"parity: {culprits}: {_place(found.first)}: {_off(found.first)}"


def _place(row: Row) -> str:
    what = row.kind if row.name == row.kind else f"{row.kind} of {row.name}"
    if row.kind == "draw":
        return f"{row.name} over draws of dropout"
    if row.kind == "output":
        return f"{row.name} in evaluation mode, of validation batch {row.step}"
    if row.kind == "metric":
        return f"{row.name}, computed from outputs that are right"
    return f"{what} at step {row.step}" if row.kind != "parameter" else f"{what} before step 1"


def _off(row: Row) -> str:
    return f"off by {row.error:.1e}, rounding or chance explains {row.bound:.1e}"


def as_dict(what: VerifyKind, found: Parity | Continuation) -> dict[str, Any]:
    """All of it in plain values; JSON has no Inf and no NaN, so these are text."""
    verdict = "exact" if isinstance(found, Parity) or found.exact else "FAIL"
    return {"what": what.value, "verdict": verdict, **json_value(asdict(found))}


def show_parity(found: Parity) -> RenderableType:
    """The verdict, and of each kind of tensor the worst; made for 80 columns."""
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim", min_width=12)
    about.add_column(ratio=1, overflow="fold")

    def line(name: str, value: str, style: str = "") -> None:
        about.add_row(plain_text(name), plain_text(value, style))

    line("verdict", found.verdict.value, STYLES[found.verdict])
    if found.first is not None:
        line("first" if found.verdict is Agreement.fail else "first bit", _place(found.first))
        line("", _off(found.first))
    if found.culprits:
        together = " (each passes alone)" if len(found.culprits) > 1 and found.alone else ""
        if any(found.alone.get(name) == Agreement.fail.value for name in found.culprits):
            together = ""
        line("culprit", " + ".join(found.culprits) + together, "bold red")
    line("techniques", ", ".join(found.techniques) or "none took")
    for name, reason in found.refused.items():
        line("", f"not {name}: {reason}")
    for name, verdict in found.alone.items():
        line("", f"{name} alone: {verdict}")
    line("precision", f"{found.precision}, held against {found.reference}")
    line("noise", f"{found.noise:.1e} between two runs of the baseline")
    for note in found.notes:
        line("note", note)

    for omission in found.not_judged:
        line("not judged", omission)

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("kind", "tensors", "step", "worst error", "explained", "in"):
        right = heading in ("step", "tensors", "worst error", "explained")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for kind in dict.fromkeys(row.kind for row in found.rows):
        group = [row for row in found.rows if row.kind == kind]
        worst = max(group, key=lambda row: row.error / row.bound if row.bound else row.error)
        style = "" if all(row.within for row in group) else "bold red"
        cells = (
            kind, str(len(group)), str(worst.step), f"{worst.error:.1e}", f"{worst.bound:.1e}",
            worst.name,
        )  # fmt: skip
        table.add_row(*(Text(cell, style=style) for cell in cells))
    title = Text(f"parity over {found.steps} steps", style="bold cyan")
    return Group(title, about, Text(), table)


def show_continuation(found: Continuation) -> RenderableType:
    """The verdict, and how much was compared."""
    heading = f"{found.steps} steps at a stretch, and again with a new start after {found.cut}"
    parts: list[RenderableType] = [Text(heading, style="bold cyan")]
    verdict = Text("exact", "green") if found.exact else Text("FAIL", "bold red")
    parts.append(Text.assemble("verdict     ", verdict))
    counts = ", ".join(f"{count} {kind} values" for kind, count in found.compared.items())
    parts.append(Text(f"compared    {counts}"))
    parts.append(Text(f"techniques  {', '.join(found.techniques) or 'none'}"))
    parts += [Text(f"differs     {name}") for name in found.differing[:10]]
    return Group(*parts)
