"""benchmark.claims=true: what people say about techniques, held against this machine."""

from __future__ import annotations

import logging
from pathlib import Path

from runner.benchmark.claims import measure_claims
from runner.benchmark.result import Claims
from runner.config import RunConfig
from runner.errors import StorageError
from runner.record.console import print_stdout
from runner.report import claims as report

log = logging.getLogger("runner")


def main(config: RunConfig, folder: Path) -> Claims:
    """Measure, show the table, leave claims.md and claims.json; what is done stays on Ctrl-C.

    Interrupted then; StorageError, once the table is shown, where the disk did not take them.
    """
    failed: list[StorageError] = []

    def keep(found: Claims) -> None:
        try:
            report.write(found, folder)
        except StorageError as error:
            failed[:] = [error]
            log.warning("%s", error)
        else:
            failed.clear()

    found = measure_claims(config, log.info, keep)
    keep(found)
    print_stdout(report.show(found))
    if failed:
        raise failed[0]
    print_stdout("", f"as Markdown: {folder / 'claims.md'}", soft_wrap=True)
    return found
