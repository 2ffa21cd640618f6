"""`python -m runner.report DIR…`: a comparison of whatever lies in finished folders."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from datetime import datetime
from pathlib import Path

from runner.errors import RunnerError, UsageError
from runner.record.console import close_logging, print_stdout, set_up_logging
from runner.record.text import escape_control_chars
from runner.report import comparison as report
from runner.report import table
from runner.security.paths import keep_within

EXAMPLES = """
examples:
  python -m runner.report outputs/sweeps/digits-mlp/2026-01-31_12-00-00-1a2b3c
  python -m runner.report outputs/runs/digits-mlp outputs/runs/digits-cnn --out outputs/mine
  python -m runner.report outputs/benchmarks/digits-mlp   # several: also how they changed
"""


def main(typed: list[str] | None = None) -> int:
    """Do what the command line asks for; the exit codes are those of `runner.errors`."""
    try:
        return _main(_arguments(sys.argv[1:] if typed is None else typed))
    except RunnerError as error:
        sys.stderr.write(f"error: {escape_control_chars(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        close_logging()


def _arguments(typed: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m runner.report",
        description="Compare finished runs, sweeps and benchmarks: a table here, and "
        "comparison.md, comparison.json, comparison.html, results.csv and a TensorBoard run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="a run's folder, a sweep's, a benchmark's, or one that holds several",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: DIR where there is one, else outputs/comparisons/<time>)",
    )
    return parser.parse_args(typed)


class _Parser(argparse.ArgumentParser):
    """One that says what is wrong in one line, as everything here does."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise it as one of our errors."""
        raise UsageError(f"{message}; --help shows how")


def _main(arguments: argparse.Namespace) -> int:
    set_up_logging("info", None)
    folders = list(dict.fromkeys(arguments.folders))
    found = report.of_folders(folders)
    out = arguments.out or (folders[0] if len(folders) == 1 else _fresh())
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: not a folder")
    if arguments.out is None and report.better_there(found, out):
        raise UsageError(
            f"{out}: {report.FILE} has measurements that benchmark.json no longer has, and is not "
            "written over; --out DIR writes what is left elsewhere"
        )
    if jobs := _written_to(report.moved(found, out)):
        keep_within(out, *jobs)  # the folder may be another's work
    written = report.write(found, out)
    print_stdout(table.terminal(report.moved(found, out)), crop=False)
    sys.stdout.flush()
    return 0 if written else 5


def _written_to(found: report.Comparison) -> list[str]:
    """The folders of jobs that get their rows; runs put together by hand get none."""
    places = [row.folder for row in found.rows if row.folder and found.kind != "runs"]
    return [p for p in places if not Path(p).is_absolute() and ".." not in Path(p).parts]


def _fresh() -> Path:
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("outputs", "comparisons", f"{now}-{secrets.token_hex(3)}")
