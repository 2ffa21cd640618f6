"""job=verify: whether techniques, several processes and a resume leave the numbers right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.config import RunConfig, config_hash
from runner.errors import NotVerified
from runner.jobs.config import VerifyKind
from runner.parity.candidates import without_techniques
from runner.parity.parity import Agreement, Parity, ParityRow
from runner.parity.reference import check_parity
from runner.record.console import facts_table, plain_text, print_stdout
from runner.record.storage import write_json
from runner.record.text import json_value
from runner.verify import distributed, resume
from runner.verify.distributed import FP64, DistributedEquality, verify_distributed
from runner.verify.rerun import Repetition, verify_rerun
from runner.verify.resume import Continuation, verify_resume

STYLES = {Agreement.exact: "green", Agreement.explained: "green", Agreement.fail: "bold red"}


Verified = Parity | Continuation | DistributedEquality | Repetition


def main(config: RunConfig, folder: Path) -> Verified:
    """Print the result and write `verify.json`; NotVerified where it is not what it should be."""
    what, verify, asked = config.verify.what, config.verify, config_hash(config)
    if config.optimization.level == "auto":
        from runner.benchmark.auto.resolve import resolve_config

        config = resolve_config(config, folder)
    result: Verified
    if what is VerifyKind.parity:
        plain = without_techniques(config)
        result = check_parity(config, plain, verify.steps, attribute=verify.attribute)
        screen, complaint = show_parity(result), _complaint(result)
    elif what is VerifyKind.distributed:
        result = verify_distributed(config, folder, verify.steps or distributed.STEPS)
        screen, complaint = show_equality(result), f"distributed: {result.first}: {result.cause}"
    elif what is VerifyKind.run:
        result = verify_rerun(config, folder, asked)
        screen = show_repetition(result)
        complaint = f"run: not the same again: {', '.join(result.differing[:1])}: {result.cause}"
    else:
        result = verify_resume(config, folder, verify.steps or resume.STEPS)
        screen = show_continuation(result)
        complaint = f"resume: not exact: {', '.join(result.differing[:3])}: {result.cause}"
    path = folder / "verify.json"
    write_json(path, as_dict(what, result))
    print_stdout(screen)
    print_stdout("", f"as JSON: {path}", soft_wrap=True)
    if verdict(result) == "FAIL":
        raise NotVerified(complaint)
    return result


def _complaint(result: Parity) -> str:
    culprits = " with ".join(f"optimization.{name}" for name in result.culprits) or "optimization"
    if result.first is None:
        return culprits
    return f"parity: {culprits}: {result.first}"


def verdict(result: Verified) -> str:
    """FAIL, or how well it is."""
    if isinstance(result, Parity):
        return result.verdict.value
    if isinstance(result, DistributedEquality):
        return "explained by rounding" if result.equal else "FAIL"
    return "exact" if result.exact else "FAIL"


def as_dict(what: VerifyKind, result: Verified) -> dict[str, Any]:
    """All of it in plain values; JSON has no Inf and no NaN, so these are text."""
    return {"what": what.value, "verdict": verdict(result), **json_value(asdict(result))}


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
    title = Text(f"parity over {result.steps} steps", style="bold cyan")
    return Group(title, facts_table(lines, 12), Text(), _worst_of_each_kind(result.rows))


def _worst_of_each_kind(rows: list[ParityRow]) -> Table:
    table = _kinds_table("tensors", "step", "worst error", "explained", "in")
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
    which = f"process {result.rank} of {result.processes}" if result.processes > 1 else "it"
    heading = (
        f"{result.steps} steps at a stretch, and again with {which} killed after step "
        f"{result.killed} and a new start after {result.cut}"
    )
    counts = ", ".join(f"{count} {kind} values" for kind, count in result.compared.items())
    lines = [
        ("verdict", verdict(result)),
        ("compared", counts),
        ("techniques", ", ".join(result.techniques) or "none"),
        *(("differs", name) for name in result.differing[:10]),
        *([("likely cause", result.cause)] if result.cause else []),
    ]
    return _about(heading, lines)


def show_repetition(result: Repetition) -> RenderableType:
    """The verdict, and what has changed since the run was recorded."""
    counts = ", ".join(f"{count} {kind} values" for kind, count in result.compared.items())
    lines = [("verdict", verdict(result)), ("compared", counts)]
    if result.differing:
        first = f"{result.differing[0]}: was {result.was}, now {result.now}"
        lines += [("first", first), ("differ", f"{len(result.differing)} values")]
        lines += [("likely cause", result.cause)]
    lines += [("changed", change) for change in result.changes]
    lines += [("note", note) for note in result.notes]
    heading = f"{result.run}: {result.steps} steps, trained again"
    return _about(heading, lines)


def show_equality(result: DistributedEquality) -> RenderableType:
    """The verdict, and of each kind of value the worst."""
    heading = f"{result.steps} steps by {result.processes} processes ({result.how}) and by one"
    lines = [("verdict", verdict(result))]
    if result.first:
        off = f"off by {result.distance:.1e} of its size, rounding explains {result.limit:.1e}"
        lines += [("first", f"{result.first}: {off}"), ("likely cause", result.cause)]
    lines += [("note", note) for note in result.notes]
    table = _kinds_table("values", "step", "worst distance", "limit", "of")
    for row in result.rows:
        style = "" if row.distance <= row.limit else "bold red"
        kind = row.kind if row.precision == FP64 else f"{row.kind}, own precision"
        numbers = f"{row.distance:.1e}", f"{row.limit:.1e}"
        cells = kind, f"{row.compared}", f"{row.step}", *numbers, row.name
        table.add_row(*(plain_text(cell, style) for cell in cells))
    return Group(_about(heading, lines), Text(), table)


def _kinds_table(*headings: str) -> Table:
    """A row for each kind: numbers, then names."""
    table = Table("kind", box=None, padding=(0, 1), pad_edge=False)
    for heading in headings[:-1]:
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column(headings[-1], overflow="fold")
    return table


def _about(heading: str, lines: list[tuple[str, str]]) -> Group:
    style = "bold red" if ("verdict", "FAIL") in lines else "green"
    rows = ((name, value, style if name == "verdict" else "") for name, value in lines)
    return Group(Text(heading, style="bold cyan"), facts_table(rows, 12))
