"""The invariants of fuzzing: each mutant has one of a few outcomes, and nothing else happens.

A file is refused, or holds what it held, or its digest gives it away. A config passes, or is
refused or found wrong in so many words; nothing is imported or made for it. Any other error that is
raised is a fault of ours.
"""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.core.errors import CheckpointError, RunnerError, SecurityError
from runner.core.security.files.file_bytes import FileBytes
from runner.core.security.files.loader import open_file
from runner.core.security.files.parsing import Examination, examine
from runner.core.security.files.policy import FileLimits, FilePolicy
from tests.core.security.files.benign import same
from tests.core.security.files.mutants import Mutant, mutated_text

REFUSED, UNCHANGED, SAME, CAUGHT = "refused", "unchanged", "same content", "caught by its digest"
PASSED, WRONG = "passed", "found wrong"
TRAP = "from pathlib import Path\nPath({marker!r}).touch()\nclass Payload: pass\n"
ORDINARY = (
    ["training.steps=3", "optimizer.lr=0.01", "model.width=32", "seed=7"],
    ["data=cancer", "optimizer=sgd", "schedule=constant", "optimization=none"],
    ["security=strict", "hydra.run.dir=outputs/mine"],
    ["objective._target_=torch.nn.functional.mse_loss"],
)


class Violation(Exception):
    """An invariant that does not hold."""


@dataclass(frozen=True)
class Case:
    """What is typed in a folder with these files."""

    typed: list[str]
    files: dict[str, str]


def hostile_configs() -> list[dict[str, object]]:
    """The rows of hostile_configs.yaml; each has `typed` and `files`."""
    rows = yaml.safe_load((Path(__file__).parents[1] / "hostile_configs.yaml").read_text())
    for row in rows:
        row.setdefault("typed", [])
        row.setdefault("files", {})
        if "file" in row:
            row["typed"] = ["--config-dir=theirs", "experiment=own", *row["typed"]]
            row["files"]["theirs/experiment/own.yaml"] = f"# @package _global_\n{row['file']}\n"
    return rows


def _cases() -> list[Case]:
    """Hostile configs but for those of many jobs, which take long; and a few ordinary ones."""
    rows = [Case(row["typed"], row["files"]) for row in hostile_configs()]  # type: ignore[arg-type]
    few = [row for row in rows if not any("range(" in word for word in row.typed)]
    return [Case(typed, {}) for typed in ORDINARY] + few


CASES = _cases()


def examined(data: bytes, path: Path) -> Examination:
    """The verdict of this process on a file of these bytes."""
    path.write_bytes(data)
    with FileBytes.open_in_place(path) as opened:
        return examine(opened.data, opened.path, path.name, FileLimits())


def judge_file(mutant: Mutant, folder: Path) -> str:
    """The outcome of one. Raises Violation."""
    path = folder / mutant.name
    verdict = examined(mutant.data, path)
    if verdict.refused:
        if verdict.content is not None or any("\n" in str(reason) for reason in verdict.reasons):
            raise Violation("refused with content, or in more than one line")
        return REFUSED
    if mutant.data == mutant.original:
        return UNCHANGED
    try:
        open_file(path, FilePolicy(), sha256=hashlib.sha256(mutant.original).hexdigest())
    except (CheckpointError, SecurityError):
        return SAME if same(examined(mutant.original, path).content, verdict.content) else CAUGHT
    raise Violation("its digest does not give it away")


def mutated_case(seed: int, number: int) -> Case:
    """A config of either corpus, of which a word or a file was changed."""
    draw = random.Random(f"config:{seed}:{number}")  # noqa: S311
    case = CASES[number % len(CASES)]
    typed, files = list(case.typed), dict(case.files)
    if files and draw.random() < 0.7:
        name = draw.choice(sorted(files))
        files[name] = mutated_text(draw, files[name])
    elif typed:
        place = draw.randrange(len(typed))
        typed[place] = mutated_text(draw, typed[place])
    return Case(typed, files)


def set_traps(folder: Path) -> Path:
    """Packages that leave a trace where they are imported; for `sys.path`."""
    traps = folder / "traps"
    (traps / "hydra_plugins").mkdir(parents=True)
    (traps / "evil_pkg").mkdir()
    trap = TRAP.format(marker=str(folder / "ran"))
    (traps / "evil_pkg" / "__init__.py").write_text(trap)
    return traps


def judge_config(case: Case, folder: Path) -> str:
    """The outcome of one, asked from `folder / "here"`, the current one. Raises Violation."""
    here = folder / "here"
    for name, text in case.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    outcome = PASSED
    try:
        check(read_arguments(case.typed))
    except RunnerError as error:
        outcome = REFUSED if isinstance(error, SecurityError) else WRONG
        if not str(error).strip():
            raise Violation("no word on what is wrong") from error
    if (folder / "ran").exists() or list(here.glob("**/ran*")) or "evil_pkg" in sys.modules:
        raise Violation("something was imported, run or made")
    return outcome
