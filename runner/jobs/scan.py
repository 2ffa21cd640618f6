"""`job=scan`: what a file, or everything in a folder, is and whether it may be loaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from runner.config import RunConfig
from runner.errors import Interrupted, SecurityError, StorageError, UsageError
from runner.record.console import console, print_stdout
from runner.record.text import escape_control_chars
from runner.report.scan import JSON, Scan, ScanRow, terminal
from runner.security.files.formats import is_loadable
from runner.security.files.policy import FilePolicy
from runner.security.files.scan import Item, Scanner, list_items
from runner.security.paths import own_trees
from runner.security.trust import Severity
from runner.training.signals import Interrupts


def main(config: RunConfig, folder: Path) -> Scan:
    """Assess `scan.path`; the list on the screen, scan.json in `folder`.

    Raises SecurityError where anything is refused or is less than the security level demands,
    UsageError where there is nothing to assess, and Interrupted with what was found until then
    written.
    """
    path = find(config.scan.path)
    scan = Scan(str(path), config.security.level)
    policy = FilePolicy.of(config.security, own_trees(folder))
    start = time.monotonic()
    with Interrupts() as interrupts:
        interrupts.waiting = True  # so that a signal cuts in at once
        try:
            _scan(path, policy, scan, config)
        except KeyboardInterrupt:
            scan.interrupted = True
        interrupts.waiting = False
        scan.seconds = time.monotonic() - start
        _write(scan, folder, config.scan.rows)
    files = f"{JSON} lies in {folder}"
    if scan.interrupted:
        so_far = f" after {len(scan.rows)} of {scan.total}; what was found is in {folder / JSON}"
        raise Interrupted(interrupts.received or signal.SIGINT, so_far)
    if scan.refused:
        raise SecurityError(f"{scan.verdict}; {files}")
    if not scan.rows:
        raise UsageError(f"scan.path: {scan.verdict}; {files}")
    print_stdout(f"{scan.verdict}; {files}", soft_wrap=True)
    return scan


def find(name: str | None) -> Path:
    """The file or folder to look at. Raises UsageError where there is nothing."""
    path = Path(name or "")
    if not os.path.exists(path):
        raise UsageError(f"scan.path: there is nothing at {path} (looked from {Path.cwd()})")
    return path


def _scan(path: Path, policy: FilePolicy, scan: Scan, config: RunConfig) -> None:
    """Fill `scan`, an item at a time."""
    items = list(_judged(path, scan))
    scan.total = len(items)
    with Scanner(policy, config.scan.deep) as scanner, _progress(config, items) as report:
        for item in items:
            found = scanner.scan(item, lambda size, item=item: report(item, size))  # type: ignore[misc]
            scan.rows.append(ScanRow(item.kind, found))


def _judged(path: Path, scan: Scan) -> Iterator[Item]:
    """What is judged; the rest is counted."""
    for item in list_items(path):
        alone = item.kind == "file" and item.path != path
        if alone and item.files and not is_loadable(item.path):
            scan.passed_over += 1
        elif not item.files and not _is_refused(item):
            scan.odd += item.odd
        else:
            yield item


def _is_refused(item: Item) -> bool:
    return any(reason.severity is Severity.REFUSAL for reason in item.odd)


def _write(scan: Scan, folder: Path, rows: int) -> None:
    try:
        scan.write(folder)
    except OSError as error:
        raise StorageError(f"{folder / JSON}: {error.strerror}") from error
    print_stdout(terminal(scan, rows), crop=False)


@contextmanager
def _progress(config: RunConfig, items: list[Item]) -> Iterator[Callable[[Item, int], None]]:
    """How far it is, on a terminal; nothing elsewhere."""
    screen = console()
    if not config.monitoring.progress or not screen.is_terminal or screen.is_dumb_terminal:
        yield lambda item, size: None
        return
    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("", total=sum(item.size for item in items))

        def report(item: Item, size: int) -> None:
            progress.update(task, advance=size, description=escape_control_chars(item.path.name))

        yield report
