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

    def save(claims: Claims) -> None:
        try:
            report.write(claims, folder)
        except StorageError as error:  # the next one may be written
            log.warning("%s", error)

    claims = measure_claims(config, log.info, save)
    print_stdout(report.show(claims))
    report.write(claims, folder)
    print_stdout("", f"as Markdown: {folder / 'claims.md'}", soft_wrap=True)
    return claims
