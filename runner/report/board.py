"""Start TensorBoard with runs named by the overrides in which they differ.

TensorBoard names a run by its path below the log folder. So the log folder is a temporary one of
symlinks: `digits-mlp/lr=0.01 seed=2` points to the run's folder, which is not changed.
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
from runner.record.hydra_files import NOT_OF_THE_RUN, recorded_overrides
from runner.record.text import escape_control_chars
from runner.report.comparison import BOARD
from runner.report.naming import names

EVENTS = "events.out.tfevents."
PASSED_OVER = {"checkpoints", "debug", "ranks", "exports"}
LONGEST = 120  # characters of a name
EVERY_S = 5.0  # between searches for new runs


def serve(folders: Sequence[Path], options: Sequence[str] = ()) -> int:
    """Run TensorBoard on these folders until it exits; `options` are passed to it.

    Runs that start meanwhile are added. Returns TensorBoard's exit code. Raises UsageError if a
    folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; give a folder of runs, such as outputs")
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
    """Update the symlinks in `home` to the runs that exist now. Returns the runs' names."""
    wanted = _named(sorted({path for folder in folders for path in _runs(folder.absolute())}))
    for path, below, links in os.walk(home, topdown=False):
        for name in (*below, *links):
            link = Path(path, name)
            if link.is_symlink() and wanted.get(str(link.relative_to(home))) != link.readlink():
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
    """Yield the folders that hold event files."""
    for path, below, files in os.walk(folder):
        below[:] = [name for name in below if name not in PASSED_OVER and name[0] != "."]
        if any(name.startswith(EVENTS) for name in files):
            yield Path(path)


def _named(runs: Sequence[Path]) -> dict[str, Path]:
    """Name each run by its experiment and, below it, the overrides in which it differs."""
    groups: dict[Path, list[Path]] = {}
    for run in runs:
        own = run.name != BOARD and not run.name[:1].isdigit()  # hydra.run.dir=outputs/tuned
        groups.setdefault(run if own else run.parent, []).append(run)
    # the experiment of `outputs/runs/<name>`, `outputs/sweeps/<name>/<time>-<id>`, a run's own
    titles = {x: x.parent.name if x.name[:1].isdigit() else x.name for x in groups}
    often = Counter(titles.values())
    wanted = {}
    for parent, members in groups.items():
        title = titles[parent]
        if often[title] > 1:
            title += f" {parent.name if parent.name != title else parent.parent.name}"
        for run, name in _labels(members).items():
            wanted["/".join(map(_file_name, filter(None, (title, name))))] = run
    return wanted


def _labels(members: Sequence[Path]) -> dict[Path, str]:
    """Label the runs of an experiment by their differing overrides; "" for a single run."""
    rest = [run for run in members if run.name != BOARD]
    typed = [
        [text for text in recorded_overrides(run) if _group(text) not in NOT_OF_THE_RUN]
        for run in rest
    ]
    alone = len(members) == 1
    made = [""] * len(rest) if alone else names(typed, [run.name for run in rest])
    boards = {run: "" if alone else BOARD for run in members if run.name == BOARD}
    return {**dict(zip(rest, made, strict=True)), **boards}


def _group(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition(".")[0]


def _file_name(name: str) -> str:
    shown = escape_control_chars(masked(name)).replace("/", "_").strip(". ")
    return shown[:LONGEST] or "run"
