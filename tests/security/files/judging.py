"""What becomes of a mutant, and whether that may be: the invariants of fuzzing.

A file is refused, or holds what it held, or its digest gives it away. A config passes, or is
refused or found wrong in so many words; nothing is imported or made for it. Whatever else is raised
is a fault of ours, and comes out.
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
from runner.errors import CheckpointError, RunnerError, SecurityError
from runner.security.files.file_bytes import FileBytes
from runner.security.files.loader import open_file
from runner.security.files.loading import Examined, examine
from runner.security.files.policy import FileLimits, FilePolicy
from tests.security.files.benign import same
from tests.security.files.mutants import Mutant, mutated_text

REFUSED, UNCHANGED, SAME, CAUGHT = "refused", "unchanged", "same content", "caught by its digest"
PASSED, WRONG = "passed", "found wrong"
TRAP = "from pathlib import Path\nPath({marker!r}).touch()\nclass Payload: pass\n"


@dataclass(frozen=True)
class Case:
    """What is typed in a folder with these files."""

    typed: list[str]
    files: dict[str, str]


def _cases() -> list[Case]:
    """Hostile configs, and a few ordinary ones. Not those whose size is their point: many jobs take
    long to look at, and are not a hang.
    """
    found = [Case(typed, {}) for typed in ORDINARY]
    for row in yaml.safe_load((Path(__file__).parents[1] / "hostile_configs.yaml").read_text()):
        typed, files = row.get("typed", []), row.get("files", {})
        if "file" in row:
            typed = ["--config-dir=theirs", "experiment=own", *typed]
            files = {"theirs/experiment/own.yaml": f"# @package _global_\n{row['file']}\n"}
        if sum(map(len, files.values())) < 20_000 and not any("range(" in word for word in typed):
            found.append(Case(typed, files))
    return found


ORDINARY = (
    ["training.steps=3", "optimizer.lr=0.01", "model.width=32", "seed=7"],
    ["data=cancer", "optimizer=sgd", "schedule=constant", "optimization=none"],
    ["security=strict", "hydra.run.dir=outputs/mine"],
    ["objective._target_=torch.nn.functional.mse_loss"],
)
CASES = _cases()


class Violation(Exception):
    """An invariant that does not hold."""


def _examine(data: bytes, path: Path) -> Examined:
    path.write_bytes(data)
    with FileBytes.watch(path) as held:
        return examine(held.data, held.place, path.name, FileLimits())


def judge_file(mutant: Mutant, folder: Path) -> str:
    """What became of it. Raises Violation."""
    path = folder / mutant.name
    found = _examine(mutant.data, path)
    if found.refused:
        if found.content is not None:
            raise Violation("refused, and there is content all the same")
        if any("\n" in str(reason) for reason in found.reasons):
            raise Violation("a reason of more than one line")
        return REFUSED
    if mutant.data == mutant.original:
        return UNCHANGED
    try:
        open_file(path, FilePolicy(), sha256=hashlib.sha256(mutant.original).hexdigest())
    except (CheckpointError, SecurityError):
        same_content = same(_examine(mutant.original, path).content, found.content)
        return SAME if same_content else CAUGHT
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
    else:
        typed = [mutated_text(draw, "training.steps=3")]
    return Case(typed, files)


def set_traps(folder: Path) -> Path:
    """A package that leaves a trace where it is imported; for `sys.path`."""
    traps = folder / "traps"
    for place in ("evil_pkg", "hydra_plugins"):
        (traps / place).mkdir(parents=True)
    trap = TRAP.format(marker=str(folder / "ran"))
    (traps / "evil_pkg" / "__init__.py").write_text(trap)
    return traps


def judge_config(case: Case, folder: Path) -> str:
    """What became of it, asked from `folder / "here"`, the current one. Raises Violation."""
    here = folder / "here"
    for name, text in case.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    outcome = PASSED
    try:
        check(read_arguments(case.typed))
    except SecurityError as error:
        outcome, message = REFUSED, str(error)
    except RunnerError as error:
        outcome, message = WRONG, str(error)
    if outcome != PASSED and not message.strip():
        raise Violation("no word on what is wrong")
    if (folder / "ran").exists() or list(here.glob("**/ran*")):
        raise Violation("something was run or made")
    if "evil_pkg" in sys.modules:
        raise Violation("evil_pkg was imported")
    return outcome
