"""A run whose folder, or files in it, were removed or moved while it trains: make them again."""

from __future__ import annotations

import logging
from pathlib import Path

from runner.core.checkpoint.lock import lock_again, owns_folder
from runner.core.errors import StorageError, UsageError
from runner.core.interfaces.run import Run
from runner.core.record.console import recreate_log_file
from runner.core.record.recorder import FILE_TITLES
from runner.core.record.storage import METRICS, make_folder, replace_text
from runner.core.train.run_state import restart_best, save

log = logging.getLogger("runner")


def recover_folder(run: Run) -> None:
    """Make the folder and its files again; called by all processes of a run.

    Records, log and config are as before; the best checkpoint starts over. If the folder cannot be
    made, the next call tries again. Raises StorageError if it holds another run now.
    """
    run.checkpointer.join()
    lost = run.checkpointer.is_lost
    if run.folder is not None:
        lost |= not owns_folder(run.folder)
        _recreate_files(run, run.folder, lost)
    lost = run.holds_for_any(lost)
    if lost and not run.checkpointer.in_memory:
        is_best = run.progress.best_step == run.progress.step > 0
        if not is_best:
            restart_best(run.progress, "is lost with the removed folder")
        run.saved_step = -1
        save(run, best=is_best)


def _recreate_files(run: Run, folder: Path, lost: bool) -> None:
    what = "files of its folder" if owns_folder(folder) else "its folder"
    missing = "earlier checkpoints and debug files are missing" if lost else "they are made again"
    run.loss = f"{what} had been removed by step {run.progress.step}: {missing}"
    try:
        if not owns_folder(folder):
            if (folder / METRICS).exists():
                raise UsageError(f"{folder} has the {METRICS} of another run")
            lock_again(folder)
            run.history.unwritten = bool(run.history.faults)
        for name, data in run.small_files.items():
            make_folder((folder / name).parent)
            if not (folder / name).exists():
                replace_text(folder / name, data.decode(errors="replace"))
        recreate_log_file()
        run.recorder.recreate()
        log.warning("%s: removed during the run; its files are made again", folder)
    except UsageError as error:
        run.folder = run.history.folder = run.recorder.folder = None  # nothing more is written
        problem = "the run's folder was removed, and another run has it now"
        raise StorageError(f"{problem}: {error}") from None
    except (OSError, StorageError) as error:
        log.warning("%s: removed during the run, and not made again: %s", folder, error)


def check_record(run: Run) -> None:
    """Raise StorageError, at the end of the run, if its record is not complete again."""
    if run.folder is None:
        return
    run.checkpointer.close()
    missing = [FILE_TITLES[kind] for kind in run.recorder.faults]
    if not owns_folder(run.folder):
        missing = ["all of it"]
    elif run.recorder.start_step and run.writes:
        missing.append(f"TensorBoard's events up to step {run.recorder.start_step}")
    if run.progress.validated_step and not (run.checkpointer.in_memory or run.checkpointer.best):
        missing.append("the best checkpoint")
    if missing:
        problem = f"the record in {run.folder} is not complete: {', '.join(missing)} is missing"
        raise StorageError(f"{problem}: {run.loss}")
