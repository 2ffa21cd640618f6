"""TensorBoard with runs named by what differs between them, not by their folders.

TensorBoard calls a run by its folder's path below the log folder. So the log folder is one of links
in a temporary place: `digits-mlp/lr=0.01 seed=2` leads to the run's folder, which stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.errors import UsageError
from runner.masking import masked
from runner.record.hparams import NOT_OF_THE_RUN
from runner.record.hydra_files import recorded_overrides
from runner.record.text import escape_control_chars
from runner.report.comparison import BOARD
from runner.report.naming import names

EVENTS = "events.out.tfevents."
PASSED_OVER = {"checkpoints", "debug", "ranks", "exports"}
LONGEST = 120  # characters of a name
EVERY_S = 5.0  # between two searches for new runs


def serve(folders: Sequence[Path], options: Sequence[str] = ()) -> int:
    """Start TensorBoard on these folders until it ends; `options` are its own.

    Runs that begin meanwhile are added. Raises UsageError where a folder is missing; returns
    TensorBoard's exit code.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name one that holds runs, as outputs")
    with TemporaryDirectory(prefix="runner-tensorboard-") as home:
        link_runs(folders, Path(home))
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", home, *options]
        server = subprocess.Popen(command)  # noqa: S603  # its options are the user's own
        try:
            while True:
                try:
                    return server.wait(EVERY_S)
                except subprocess.TimeoutExpired:
                    link_runs(folders, Path(home))
        finally:
            server.terminate()
            server.wait()


def link_runs(folders: Sequence[Path], home: Path) -> list[str]:
    """Make the links in `home` those of the runs that there are now; return their names."""
    wanted = _named(sorted({path for folder in folders for path in _runs(folder.absolute())}))
    for path, below, links in os.walk(home, topdown=False):
        for name in (*below, *links):
            link = Path(path, name)
            known = wanted.get(str(link.relative_to(home)))
            if link.is_symlink() and known != link.readlink():
                link.unlink()
            elif not link.is_symlink() and not os.listdir(link):
                link.rmdir()
    for name, folder in wanted.items():
        link = home / name
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder)
    return list(wanted)


def _runs(folder: Path) -> Iterator[Path]:
    """The folders that hold event files."""
    for path, below, files in os.walk(folder):
        below[:] = [name for name in below if name not in PASSED_OVER and name[0] != "."]
        if any(name.startswith(EVENTS) for name in files):
            yield Path(path)


def _named(runs: Sequence[Path]) -> dict[str, Path]:
    """A name for each run: that of its experiment, and below it what differs."""
    groups: dict[Path, list[Path]] = {}
    for run in runs:
        own = run.name != BOARD and not run.name[:1].isdigit()  # hydra.run.dir=outputs/tuned
        groups.setdefault(run if own else run.parent, []).append(run)
    titles = {parent: _title(parent) for parent in groups}
    often = Counter(titles.values())
    wanted = {}
    for parent, members in groups.items():
        title = titles[parent]
        if often[title] > 1:
            title += f" {parent.name if parent.name != title else parent.parent.name}"
        for run, name in zip(members, _labels(members), strict=True):
            wanted[_file_name(title) + (f"/{_file_name(name)}" if name else "")] = run
    return wanted


def _title(parent: Path) -> str:
    """The experiment: `outputs/runs/<name>`, `outputs/sweeps/<name>/<time>-<id>`, or a run's own
    folder."""
    return parent.parent.name if parent.name[:1].isdigit() else parent.name


def _labels(members: Sequence[Path]) -> list[str]:
    """What differs between the runs of an experiment; "" for one by itself."""
    if len(members) == 1:
        return [""]
    if any(run.name == BOARD for run in members):
        rest = [run for run in members if run.name != BOARD]
        labels = iter(_labels(rest) if len(rest) > 1 else [rest[0].name] if rest else [])
        return [BOARD if run.name == BOARD else next(labels) for run in members]
    typed = [
        [text for text in recorded_overrides(run) if _key(text).split(".")[0] not in NOT_OF_THE_RUN]
        for run in members
    ]
    return names(typed, [run.name for run in members])


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _file_name(name: str) -> str:
    shown = escape_control_chars(masked(name)).replace("/", "_").strip(". ")
    return shown[:LONGEST] or "run"
