"""Start TensorBoard with runs named by the overrides in which they differ.

TensorBoard names a run by its path below the log folder. So the log folder is a temporary one of
symlinks: `digits-mlp/lr=0.01 seed=2` points to the run's folder, which is not changed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.core.errors import UsageError
from runner.core.masking import mask_secrets
from runner.core.record.hydra_files import NON_HPARAM_GROUPS, recorded_overrides
from runner.core.record.text import escape_control_chars
from runner.measure.comparison import TENSORBOARD_RUN
from runner.measure.naming import name_rows

EVENT_FILE_PREFIX = "events.out.tfevents."
SKIPPED_FOLDERS = {"checkpoints", "debug", "ranks", "exports"}
MAX_NAME_LENGTH = 120  # characters of a name
REFRESH_S = 5.0  # between searches for new runs


def serve(folders: Sequence[Path], options: Sequence[str] = ()) -> int:
    """Run TensorBoard on these folders until it exits; `options` are passed to it.

    Runs that start meanwhile are added. Returns TensorBoard's exit code. Raises UsageError if a
    folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; give a folder of runs, such as outputs")
    with TemporaryDirectory(prefix="runner-tensorboard-") as logdir:
        link_runs(folders, Path(logdir))
        command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", logdir, *options]
        server = subprocess.Popen(command)  # noqa: S603  # its options are the user's own
        # leaves with the server and the folder
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            while True:
                try:
                    return server.wait(REFRESH_S)
                except subprocess.TimeoutExpired:
                    link_runs(folders, Path(logdir))
        finally:
            server.terminate()
            server.wait()
            signal.signal(signal.SIGTERM, before)


def link_runs(folders: Sequence[Path], logdir: Path) -> list[str]:
    """Update the symlinks in `logdir` to the runs that exist now. Returns the runs' names."""
    runs_by_name = _name_runs(sorted({path for f in folders for path in _find_runs(f.absolute())}))
    for path, subfolders, files in os.walk(logdir, topdown=False):
        for name in (*subfolders, *files):
            link = Path(path, name)
            run = runs_by_name.get(str(link.relative_to(logdir)))
            if link.is_symlink() and run != link.readlink():
                link.unlink()
            elif not link.is_symlink() and not os.listdir(link):
                link.rmdir()
    for name, folder in runs_by_name.items():
        link = logdir / name
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder)
    return list(runs_by_name)


def _find_runs(folder: Path) -> Iterator[Path]:
    for path, subfolders, files in os.walk(folder):
        subfolders[:] = [n for n in subfolders if n not in SKIPPED_FOLDERS and n[0] != "."]
        if any(name.startswith(EVENT_FILE_PREFIX) for name in files):
            yield Path(path)


def _name_runs(runs: Sequence[Path]) -> dict[str, Path]:
    """Name each run by its experiment and, below it, the overrides in which it differs."""
    groups: dict[Path, list[Path]] = {}
    for run in runs:
        # with hydra.run.dir=outputs/tuned, the run's folder is named by the user
        has_own_name = run.name != TENSORBOARD_RUN and not run.name[:1].isdigit()
        groups.setdefault(run if has_own_name else run.parent, []).append(run)
    # the experiment of `outputs/runs/<name>`, `outputs/sweeps/<name>/<time>-<id>`, a run's own
    titles = {x: x.parent.name if x.name[:1].isdigit() else x.name for x in groups}
    title_counts = Counter(titles.values())
    runs_by_name = {}
    for parent, members in groups.items():
        title = titles[parent]
        if title_counts[title] > 1:
            title += f" {parent.name if parent.name != title else parent.parent.name}"
        for run, name in _label_runs(members).items():
            runs_by_name["/".join(map(_file_name, filter(None, (title, name))))] = run
    return runs_by_name


def _label_runs(members: Sequence[Path]) -> dict[Path, str]:
    """Label the runs of an experiment by their differing overrides; "" for a single run."""
    if len(members) == 1:
        return {members[0]: ""}
    runs = [run for run in members if run.name != TENSORBOARD_RUN]
    overrides = [
        [t for t in recorded_overrides(run) if _config_group(t) not in NON_HPARAM_GROUPS]
        for run in runs
    ]
    labels = dict(zip(runs, name_rows(overrides, [run.name for run in runs]), strict=True))
    return {**labels, **{run: TENSORBOARD_RUN for run in members if run not in labels}}


def _config_group(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition(".")[0]


def _file_name(name: str) -> str:
    printable = escape_control_chars(mask_secrets(name)).replace("/", "_").strip(". ")
    return printable[:MAX_NAME_LENGTH] or "run"
