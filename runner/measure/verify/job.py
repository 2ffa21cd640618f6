"""job=verify: check that techniques, several processes or a resume do not change results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.core.config.run_config import RunConfig, config_hash
from runner.core.config.variants import without_techniques
from runner.core.errors import NotVerified
from runner.core.format import count_noun
from runner.core.record.console import facts_table, plain_text, print_stdout
from runner.core.record.storage import write_json
from runner.core.record.text import json_safe
from runner.core.schemas.jobs import VerifyKind
from runner.measure.parity.distance import Parity, ParityRow
from runner.measure.parity.reference import check_parity
from runner.measure.verify import distributed, resume
from runner.measure.verify.distributed import FP64, DistributedEquality, verify_distributed
from runner.measure.verify.rerun import RerunEquality, verify_rerun
from runner.measure.verify.resume import ResumeEquality, verify_resume

VerificationResult = Parity | ResumeEquality | DistributedEquality | RerunEquality
Lines = list[tuple[str, str]]


def main(config: RunConfig, folder: Path) -> VerificationResult:
    """Run the check, print it, write `verify.json`; raises NotVerified if it fails."""
    what, verify, requested_hash = config.verify.what, config.verify, config_hash(config)
    if config.optimization.level == "auto":
        from runner.measure.auto.resolve import resolve_config

        config = resolve_config(config, folder)
    result: VerificationResult
    if what is VerifyKind.parity:
        baseline = without_techniques(config)
        result = check_parity(config, baseline, verify.steps, attribute=verify.attribute)
    elif what is VerifyKind.distributed:
        result = verify_distributed(config, folder, verify.steps or distributed.STEPS)
    elif what is VerifyKind.run:
        result = verify_rerun(config, folder, requested_hash)
    else:
        result = verify_resume(config, folder, verify.steps or resume.STEPS)
    path = folder / "verify.json"
    # JSON has no Inf and NaN, so they become text
    report = {"what": what.value, "verdict": verdict_text(result), **json_safe(asdict(result), str)}
    write_json(path, report)
    print_stdout(format_result(result))
    print_stdout("", f"as JSON: {path}", soft_wrap=True)
    if verdict_text(result) == "FAIL":
        raise NotVerified(_failure_message(result))
    return result


def verdict_text(result: VerificationResult) -> str:
    """Return FAIL, or the degree of agreement."""
    if isinstance(result, Parity):
        return result.verdict.value
    if isinstance(result, DistributedEquality):
        return "explained by rounding" if result.equal else "FAIL"
    return "exact" if result.exact else "FAIL"


def _failure_message(result: VerificationResult) -> str:
    if isinstance(result, DistributedEquality):
        return f"distributed: {result.first}: {result.cause}"
    if isinstance(result, RerunEquality):
        return f"run: not reproduced: {result.differing[0]}: {result.cause}"
    if isinstance(result, ResumeEquality):
        return f"resume: not exact: {', '.join(result.differing[:3])}: {result.cause}"
    culprits = " with ".join(f"optimization.{name}" for name in result.culprits) or "optimization"
    return f"parity: {culprits}: {result.first}"


# -- display, for 80 columns -----------------------------------------------------------------------


def format_result(result: VerificationResult) -> RenderableType:
    """Return the verdict with its evidence, and the worst value of each kind."""
    tables: list[RenderableType] = []
    if isinstance(result, Parity):
        (heading, lines), tables = _describe_parity(result), [Text(), _parity_table(result.rows)]
    elif isinstance(result, DistributedEquality):
        (heading, lines), tables = _describe_equality(result), [Text(), _distance_table(result)]
    elif isinstance(result, RerunEquality):
        heading, lines = _describe_rerun(result)
    else:
        heading, lines = _describe_resume(result)
    text = verdict_text(result)
    rows = [("verdict", text, "bold red" if text == "FAIL" else "green")]
    rows += [(name, value, "bold red" if name == "culprit" else "") for name, value in lines]
    return Group(Text(heading, style="bold cyan"), facts_table(rows, 12), *tables)


def _describe_parity(result: Parity) -> tuple[str, Lines]:
    lines = [("first", str(result.first))] if result.first is not None else []
    if result.culprits:
        pass_alone = result.alone and "FAIL" not in result.alone.values()
        suffix = " (each passes alone)" if pass_alone and len(result.culprits) > 1 else ""
        lines.append(("culprit", " + ".join(result.culprits) + suffix))
    lines.append(("techniques", ", ".join(result.techniques) or "none took"))
    lines += [("", f"not {name}: {reason}") for name, reason in result.refused.items()]
    lines += [("", f"{name} alone: {outcome}") for name, outcome in result.alone.items()]
    lines.append(("precision", f"{result.precision}, compared with {result.reference}"))
    lines += [("note", note) for note in result.notes]
    lines += [("not judged", omission) for omission in result.not_judged]
    return f"parity over {count_noun(result.steps, 'step')}", lines


def _compared(result: ResumeEquality | RerunEquality) -> tuple[str, str]:
    counts = (f"{count} {kind} values" for kind, count in result.compared.items())
    return "compared", ", ".join(counts)


def _describe_resume(result: ResumeEquality) -> tuple[str, Lines]:
    process = f"process {result.rank} of {result.processes}" if result.processes > 1 else "it"
    often = "twice" if len(result.cuts) > 1 else f"after step {result.killed}"
    starts = " and ".join(map(str, result.cuts or [result.cut]))
    lines = [_compared(result), ("techniques", ", ".join(result.techniques) or "none")]
    lines += [("differs", name) for name in result.differing[:10]]
    lines += [("likely cause", result.cause)] if result.cause else []
    steps = f"{result.steps} uninterrupted steps"
    return f"{steps}, compared with {process} killed {often} and resumed from {starts}", lines


def _describe_rerun(result: RerunEquality) -> tuple[str, Lines]:
    lines = [_compared(result)]
    if result.differing:
        first = f"{result.differing[0]}: was {result.was}, now {result.now}"
        lines += [("first", first), ("differ", f"{len(result.differing)} values")]
        lines.append(("likely cause", result.cause))
    lines += [("changed", change) for change in result.changes]
    lines += [("note", note) for note in result.notes]
    return f"{result.run}: {result.steps} steps, trained again", lines


def _describe_equality(result: DistributedEquality) -> tuple[str, Lines]:
    lines = []
    if result.first:
        off = f"off by {result.distance:.1e} of its size, rounding explains {result.limit:.1e}"
        lines = [("first", f"{result.first}: {off}"), ("likely cause", result.cause)]
    lines += [("note", note) for note in result.notes]
    how = f"by {result.processes} processes ({result.how}) and by one"
    return f"{result.steps} steps {how}", lines


def _parity_table(rows: list[ParityRow]) -> Table:
    table = []
    for kind in dict.fromkeys(row.kind for row in rows):
        group = [row for row in rows if row.kind == kind]
        worst = max(group, key=lambda row: row.excess)
        numbers = f"{worst.step}", f"{worst.error:.1e}", f"{worst.bound:.1e}"
        within = all(row.within for row in group)
        table.append((within, (kind, f"{len(group)}", *numbers, worst.name)))
    return _kinds_table(("tensors", "step", "worst error", "allowed", "in tensor"), table)


def _distance_table(result: DistributedEquality) -> Table:
    table = []
    for row in result.rows:
        kind = row.kind if row.precision == FP64 else f"{row.kind}, own precision"
        numbers = f"{row.compared}", f"{row.step}", f"{row.distance:.1e}", f"{row.limit:.1e}"
        table.append((row.distance <= row.limit, (kind, *numbers, row.name)))
    return _kinds_table(("values", "step", "worst distance", "limit", "of"), table)


def _kinds_table(headings: tuple[str, ...], rows: Iterable[tuple[bool, tuple[str, ...]]]) -> Table:
    """Return a table with a row per kind; rows beyond the limit are red."""
    table = Table("kind", box=None, padding=(0, 1), pad_edge=False)
    for heading in headings:
        is_number = heading != headings[-1]
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for within, cells in rows:
        table.add_row(*(plain_text(cell, "" if within else "bold red") for cell in cells))
    return table
