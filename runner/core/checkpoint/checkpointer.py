"""Checkpoints: a run's state on disk, written atomically and verified when read."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from runner.core.checkpoint import folder as folders
from runner.core.checkpoint import manifest
from runner.core.checkpoint.folder import RestoredCheckpoint, StateCheck
from runner.core.checkpoint.manifest import Manifest, read_manifest
from runner.core.checkpoint.snapshot import Copier, Snapshot, write_state, write_tensors
from runner.core.errors import CheckpointError, SecurityError, StorageError
from runner.core.module_path import __version__
from runner.core.record import storage
from runner.core.security.files.policy import FilePolicy

if TYPE_CHECKING:
    from runner.core.interfaces.shards import CheckpointCommitProtocol

log = logging.getLogger("runner")

MAX_FAILURES = 3  # consecutive failed saves, after which the run ends


class Checkpointer:
    """Saves a run in the background, and restores the newest good checkpoint.

    Without a folder it keeps the last checkpoint in memory, for rollbacks. With one, the caller
    must have its `lock`, since remains of a crash are deleted.
    """

    def __init__(
        self,
        folder: Path | None,
        keep: int,
        config_hash: str = "",
        policy: FilePolicy | None = None,  # for checkpoints of other run trees; None: trusted
        best_first: bool = False,  # for a run's folder take its best checkpoint
        writes: bool = True,  # False: another process does
    ) -> None:
        self._policy, self._best_first, self._writes = policy, best_first, writes
        self.faults: dict[str, int] = {}  # counts by kind
        self.choices: dict[str, Any] = {}  # automatic ones, stored in every manifest
        self.preprocessing = b""  # of the data, written into every checkpoint
        self.commit: CheckpointCommitProtocol | None = None  # set if each process writes a shard
        self.unplanned: set[int] = set()  # steps saved at an early end: not in `keep`
        self.suspect_steps: set[int] = set()  # steps; the checkpoint before each of them is kept
        self._root = None if folder is None else folder / folders.FOLDER
        self._keep = keep
        self._config_hash = config_hash
        # Without reuse, so that the checkpoint in memory is complete until the next one is.
        self._copier = Copier(reuse=folder is not None)
        self._memory: tuple[int, Snapshot] | None = None
        self._thread: Thread | None = None
        self._failures, self._has_written = 0, False  # consecutive ones; a checkpoint
        self._disk_error: OSError | None = None  # of the last save, if it failed
        self._thread_error: Exception | None = None  # of the thread, other than disk errors
        if self._root is not None and self._root.is_symlink():  # pruning would delete others'
            problem = f"{self._root}: refused: symlink to {self._root.resolve()}"
            raise SecurityError(f"{problem}; checkpoints need a folder of their own")
        if self._writes and self._root is not None and self._root.is_dir():
            folders.delete_leftovers(self._root)

    @property
    def in_memory(self) -> bool:
        """Whether checkpoints are in memory, each replacing the previous one."""
        return self._root is None

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run's folder contains checkpoints, good or not."""
        return self._root is not None and bool(folders.steps(self._root))

    def owns(self, path: Path) -> bool:
        """Whether `path` is a checkpoint that this run has written."""
        return self._root is not None and path.resolve().parent == self._root.resolve()

    def inherit(self, checkpoint: Path) -> str:
        """Copy another run's best checkpoint after the save in progress; return why not, or ""."""
        self.join()
        if self._root is None:
            return ""
        if self.last is None:
            return "the run's own checkpoint is not written"
        try:
            folders.inherit(self._root, checkpoint)
        except (OSError, CheckpointError) as error:
            return str(error)
        return ""

    @property
    def last(self) -> str | None:
        """Folder of the newest checkpoint, relative to the run's."""
        return None if self._root is None else folders.link_target(self._root, "last")

    @property
    def is_lost(self) -> bool:
        """Whether all checkpoints that were written have been removed since."""
        saves = self._thread is not None and self._thread.is_alive()
        return self._has_written and not saves and self.last is None

    @property
    def best(self) -> str | None:
        """The best checkpoint's folder, relative to the run's."""
        return None if self._root is None else folders.link_target(self._root, "best")

    def save(
        self,
        step: int,
        model: dict[str, Any],
        state: dict[str, Any],
        best: bool,
        sharded: Collection[str] = (),
    ) -> None:
        """Copy model and state now, and write them in the background after the previous save.

        Of the `sharded` weights, and of their optimizer state, this process has a shard.

        A full or read-only disk is logged and counted; the next save tries again. Raises
        StorageError after three failures in a row, and TypeError naming what cannot be saved.
        """
        if self._root is not None and not self._writes and self.commit is None:
            return
        self.wait()
        if self._root is None:
            self._memory = (step, self._copier.take(model, state))
            return
        if self.commit is None:
            snapshot = self._copier.take(model, state)
        else:
            from runner.core.checkpoint import shards

            snapshot = shards.copy_shard(self._copier, model, state, sharded, self._writes)
        write = partial(self._write, self._root, step, snapshot, best)
        if self.commit is not None and not self._writes:
            folder = self._root / (folders.TEMPORARY_PREFIX + folders.step_name(step))
            write = partial(shards.write_shard, self.commit, folder, snapshot)
        # No daemon: the interpreter waits for it at exit, so that the checkpoint is not lost.
        self._thread = Thread(target=write)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress; StorageError if three saves in a row failed."""
        self._finish()
        if self._failures >= MAX_FAILURES:
            raise self._save_error(f"{self._failures} checkpoints in a row were")

    def close(self) -> None:
        """Wait for the save in progress; StorageError if the last checkpoint was not written."""
        self._finish()
        if self._failures:
            raise self._save_error("the last checkpoint was")

    def restore(
        self, source: Path | None = None, check: StateCheck | None = None
    ) -> RestoredCheckpoint | None:
        """Return the newest good checkpoint of this run, of the run `source`, or that step folder.

        A bad checkpoint, or one with a state that fails `check`, is logged and the one before it is
        used. Returns None if this run has no checkpoint yet. Raises CheckpointError if none is
        good, or there is none in `source`; SecurityError if an undamaged one holds more than data.
        """
        from runner.core.checkpoint import reading  # imported only if used

        self.join()
        restored: RestoredCheckpoint | None = None
        if source is not None and _is_step(source):
            restored = reading.load_checkpoint(source, self._policy, check)
        elif source is not None:
            root = folders.root_of(source)
            restored = reading.load_newest(root, self._policy, check, self._best_first)
            if restored is None:
                raise CheckpointError(f"{source}: no checkpoint found (looked for {root}/step_…)")
        elif self._root is not None:
            restored = reading.load_newest(self._root, check=check)
        elif self._memory is not None:
            step, snapshot = self._memory
            # copied, since optimizers keep the tensors that they load
            copied = Copier(reuse=False).take(snapshot.model, snapshot.state)
            restored = RestoredCheckpoint(step, copied.model, copied.state, Path("memory"))
        for warning in (*restored.warnings, *restored.differences) if restored else ():
            log.warning("checkpoint: %s", warning)
        return restored

    def newest_before(self, step: int) -> Path | None:
        """Return the folder of the newest complete checkpoint before `step`, or None."""
        self.join()
        saved = {} if self._root is None else folders.steps(self._root)
        earlier = [n for n, path in saved.items() if n < step and folders.is_checkpoint(path)]
        return saved[max(earlier)] if earlier else None

    def recorded_choices(self, source: Path | None = None) -> dict[str, Any]:
        """Return the choices in the newest readable manifest that `restore` would try, or {}."""
        for folder in self._restore_candidates(source):
            with suppress(CheckpointError):
                return read_manifest(folder).choices
        return {}

    def read_preprocessing(self, source: Path | None = None) -> tuple[Path, bytes] | None:
        """Return path and content from the newest intact checkpoint to `restore`, or None."""
        from runner.core.checkpoint import reading

        for folder in self._restore_candidates(source):
            with suppress(CheckpointError):
                facts = read_manifest(folder)
                if manifest.PREPROCESSING not in facts.files:
                    return None
                path = folder / manifest.PREPROCESSING
                return path, reading.read_preprocessing(folder, facts)
        return None

    def _restore_candidates(self, source: Path | None) -> list[Path]:
        if source is not None and _is_step(source):
            return [source]
        root = self._root if source is None else folders.root_of(source)
        return [] if root is None else folders.list_candidates(root, self._best_first)

    def join(self) -> None:
        """Wait for the save in progress; `wait` and `close` raise its errors."""
        if self._thread is not None:
            self._thread.join()

    def _finish(self) -> None:
        self.join()
        self._thread = None
        if self._thread_error is not None:
            error, self._thread_error = self._thread_error, None
            raise error

    def _save_error(self, problem: str) -> StorageError:
        reason = _error_reason(self._disk_error)
        return StorageError(f"{self._root}: {problem} not written: {reason}")

    def _write(self, root: Path, step: int, snapshot: Snapshot, best: bool) -> None:
        """Write a checkpoint, in the background thread; store errors for `wait` and `close`."""
        temporary = root / (folders.TEMPORARY_PREFIX + folders.step_name(step))
        try:
            self._make_temporary(temporary)
            self._write_parts(temporary, step, snapshot, best or folders.is_best(root, step))
            storage.replace_folder(temporary, root / folders.step_name(step))
            folders.abandon_from(root, step)
            self._prune(root, step)
            self._failures, self._disk_error, self._has_written = 0, None, True
        except OSError as error:
            self._failures, self._disk_error = self._failures + 1, error
            self.faults["checkpoint"] = self.faults.get("checkpoint", 0) + 1
            message = "%s: the checkpoint of step %d was not written: %s; earlier ones are kept"
            log.warning(message, root, step, _error_reason(error))
        except Exception as error:  # raised again by the next call on the training thread
            self._thread_error = error
        finally:
            storage.remove_folder(temporary, ignore_errors=True)

    def _make_temporary(self, temporary: Path) -> None:
        try:
            storage.remove_folder(temporary, ignore_errors=True)
            storage.make_folder(temporary)
        finally:
            if self.commit is not None:
                self.commit.announce_folder(temporary.is_dir())

    def prune(self, step: int) -> None:
        """Delete checkpoints beyond `keep`, left by a killed save, if `step` is the newest one."""
        if not self._writes:
            return
        if self._root is not None and step == max(folders.steps(self._root), default=None):
            with suppress(OSError):  # the next save reports the error
                self._prune(self._root, step)

    def _prune(self, root: Path, step: int) -> None:
        """Prune, but keep the checkpoint before each step that is, or may turn out, bad."""
        saved = folders.steps(root)
        saved_before = [[n for n in saved if n < bad_step] for bad_step in self.suspect_steps]
        kept_steps = {max(steps) for steps in saved_before if steps}
        protected = {step, folders.update_links(root), *kept_steps}
        folders.prune(root, self._keep, protected, self.unplanned - {step})

    def _write_parts(self, folder: Path, step: int, snapshot: Snapshot, best: bool) -> None:
        write, together = storage.write_file, self.commit
        name = manifest.MODEL
        if together is not None:
            name = manifest.shard_name(0, together.size)
        parts = {name: write_tensors, manifest.STATE: write_state}
        files = {n: write(folder / n, partial(f, snapshot)) for n, f in parts.items()}
        if data := self.preprocessing:
            name = manifest.PREPROCESSING
            files[name] = write(folder / name, partial(_write_bytes, data))
        if together is not None:
            for rank, written in enumerate(together.collect_digests(), 1):
                files[manifest.shard_name(rank, together.size)] = written
        facts = Manifest(
            step=step,
            best=best,
            files=files,
            config_hash=self._config_hash,
            created_by=__version__,
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            cpu=torch.backends.cpu.get_cpu_capability(),
            tied=snapshot.tied,
            choices=self.choices,
        )
        storage.write_file(folder / manifest.NAME, facts.write)
        storage.sync_folder(folder)


def _is_step(source: Path) -> bool:
    return bool(folders.STEP.fullmatch(source.resolve().name)) or folders.is_checkpoint(source)


def _write_bytes(data: bytes, file: storage.HashedFile) -> None:
    file.write(data)


def _error_reason(error: OSError | None) -> str:
    return "" if error is None else error.strerror or str(error)
