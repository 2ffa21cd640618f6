"""A check: the commands it starts, the configs it builds, and the function that judges them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
FACTS_FILE = "facts.json"
Facts = dict[str, Any]


class CheckFailed(Exception):
    """Something did not hold; the message says what."""


class CheckSkipped(Exception):
    """The check cannot be made on this machine; the message says why."""


def require(holds: object, message: str) -> None:
    """Raise CheckFailed with the message unless it holds."""
    if not holds:
        raise CheckFailed(message)


@dataclass(frozen=True)
class Command:
    """One `python -m runner …`; `{folder}` in an override is the folder of its check."""

    name: str  # of its folder in that of the check
    overrides: tuple[str, ...]
    exit_code: int = 0
    launcher: tuple[str, ...] = ()  # arguments of Python before `-m runner`
    variables: Mapping[str, str] = field(default_factory=dict)
    sweep: bool = False

    def resolve(self, device: str, folder: Path) -> list[str]:
        """Return the overrides with device and output folder."""
        overrides = [text.replace("{folder}", str(folder)) for text in self.overrides]
        if not any(text.startswith("device=") for text in overrides):
            overrides.insert(0, f"device={device}")
        kind = "sweep" if self.sweep else "run"
        return [*overrides, f"hydra.{kind}.dir={folder / self.name}"]

    def argv(self, device: str, folder: Path) -> list[str]:
        """Return the command line."""
        flags = ["-m"] if self.sweep else []
        overrides = self.resolve(device, folder)
        return [sys.executable, *self.launcher, "-m", "runner", *flags, *overrides]

    def text(self, device: str, folder: Path) -> str:
        """Return the command line as it is typed in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.argv(device, folder))])


@dataclass(frozen=True)
class Workplace:
    """The device and the folder of a check; facts are written as soon as they are known."""

    device: str  # cuda | cpu
    folder: Path
    facts: Facts = field(default_factory=dict)

    def record(self, **facts: Any) -> None:
        """Add facts and write them all, so that a check that is killed keeps them."""
        self.facts.update(facts)
        temporary = self.folder / f".{FACTS_FILE}.tmp"
        temporary.write_text(json.dumps(self.facts, indent=2, default=str))
        temporary.replace(self.folder / FACTS_FILE)

    def run(self, *commands: Command) -> None:
        """Run the commands side by side; CheckFailed unless all end with their exit codes.

        Each prints to `NAME.log` in the check's folder.
        """
        started = []
        for command in commands:
            log = self.folder / f"{command.name}.log"
            with log.open("wb") as output:
                argv, environment = command.argv(self.device, self.folder), child_environment()
                started.append(
                    subprocess.Popen(
                        argv, cwd=ROOT, env={**environment, **command.variables},
                        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        problems = []
        for command, process in zip(commands, started, strict=True):
            if (code := process.wait()) != command.exit_code:
                tail = last_lines(self.folder / f"{command.name}.log", 12)
                problems.append(
                    f"{command.name}: exit code {code}, not {command.exit_code}:\n{tail}"
                )
        require(not problems, "\n".join(problems))

    def read_json(self, *names: str) -> Any:
        """Return the contents of a JSON file in the check's folder."""
        path = self.folder.joinpath(*names)
        require(path.is_file(), f"{path.relative_to(self.folder)} was not written")
        return json.loads(path.read_text())

    def summary(self, name: str, status: str = "done") -> Any:
        """Return the summary of a command's run; CheckFailed unless it has this status."""
        summary = self.read_json(name, "summary.json")
        reason = f"{name}: {summary['status']}, not {status}: {summary['reason']}"
        require(summary["status"] == status, reason)
        return summary


@dataclass(frozen=True)
class Check:
    """One check: the function of its name in a module, and what it starts under `NAME` there.

    That is a tuple of commands, or of the overrides of runs in the check's own process.
    """

    name: str
    module: str  # of this package; imported only where it is needed, as it may import torch
    limit_s: float
    claim: str  # what must hold
    alone: bool = False  # nothing else runs beside it

    def argv(self, device: str, folder: Path) -> list[str]:
        """Return the command line of the check's own process."""
        place = [f"--device={device}", f"--folder={folder / self.name}"]
        return [sys.executable, "-m", "gpu_checks", self.name, *place]

    def make(self, device: str, folder: Path) -> Workplace:
        """Make the check in `folder`, which is emptied first; CheckFailed or CheckSkipped."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        place = Workplace(device, folder)
        place.record()
        getattr(import_module(f"gpu_checks.{self.module}"), self.name)(place)
        return place

    def plan(self) -> tuple[Command | tuple[str, ...], ...]:
        """Return its commands, or the overrides of the runs that it builds itself."""
        constants = vars(import_module(f"gpu_checks.{self.module}"))
        parts: tuple[Command | tuple[str, ...], ...] = constants.get(self.name.upper(), ())
        return parts

    def shell_lines(self, device: str, folder: Path) -> list[str]:
        """Return everything that it starts as command lines, a run in its own process as one."""
        place = folder / self.name
        return [
            part.text(device, place)
            if isinstance(part, Command)
            else f"python -m runner device={device} {shlex.join(part)}"
            for part in self.plan()
        ]

    def configs(self, device: str, folder: Path) -> list[list[str]]:
        """Return the overrides of every config that it composes, a sweep's job by job."""
        lists: list[list[str]] = []
        for part in self.plan():
            if not isinstance(part, Command):
                lists.append([f"device={device}", *part])
                continue
            overrides = part.resolve(device, folder / self.name)
            lists += _sweep_jobs(overrides) if part.sweep else [overrides]
        return lists


def _sweep_jobs(overrides: list[str]) -> list[list[str]]:
    choices = []
    for text in overrides:
        key, _, values = text.partition("=")
        several = "," in values and not values.startswith(("[", "{", "'"))
        choices.append([f"{key}={value}" for value in values.split(",")] if several else [text])
    return [list(job) for job in product(*choices)]


def child_environment() -> dict[str, str]:
    """Return the environment of commands and checks: both packages can be imported."""
    paths = [str(ROOT), str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a text file, or "" if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 64 * 1024))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(lines[-count:])


def technique_rows(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a summary's techniques by name."""
    return {row["name"]: row for row in summary["techniques"]}


def require_engaged(summary: Mapping[str, Any], names: Sequence[str], run: str) -> None:
    """Raise CheckFailed unless the summary shows these techniques as engaged.

    A quantized model that was measured, and is slower than in float, has run as well.
    """
    rows = technique_rows(summary)
    for name in names:
        row = rows.get(name, {"engaged": False, "reason": "not in the summary"})
        has_run = row["engaged"] or row["reason"].startswith("slower at this width")
        require(has_run, f"{run}: {name} is not engaged: {row['reason']}")
