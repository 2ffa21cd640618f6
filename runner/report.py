"""`python -m runner.report DIR…`: compare runs, write tables, clean up, or start TensorBoard."""

from __future__ import annotations

import argparse
import secrets
import sys
from datetime import datetime
from pathlib import Path

from runner.core.errors import RunnerError, StorageError, UsageError
from runner.core.module_path import current_folder_last
from runner.core.standard_streams import prepare_streams, write_stream

EXAMPLES = """
examples:
  python -m runner.report outputs/sweeps/digits-mlp/2026-01-31_12-00-00-1a2b3c
  python -m runner.report outputs/runs/digits-mlp outputs/runs/digits-cnn --out outputs/mine
  python -m runner.report outputs/runs/digits-mlp/2026-01-31_12-00-00-1a2b3c --tables csv
  python -m runner.report --tensorboard outputs --port=6007
  python -m runner.report --clean
  python -m runner.report --clean outputs/runs/digits-mlp/2026-01-31_12-00-00-1a2b3c
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; --help shows how")


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m runner.report",
        description="Compare finished runs, sweeps or a benchmark: a table here, and "
        "comparison.md, comparison.json, comparison.html and a TensorBoard run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folders_help = "folder of a run, of a sweep or of several runs; or a single benchmark's folder"
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help=folders_help)
    out_help = "output folder (default: DIR if only one is given, else outputs/comparisons/<time>)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    tables_help = "only write the records of runs as tables (to DIR/debug/tables of a single one): "
    tables_help += "metrics, faults, anomalies, gradients, memory, operators, modules"
    parser.add_argument("--tables", choices=("csv", "parquet"), help=tables_help)
    plots_help = "only draw plots of runs, also of those that ended early, to debug/plots of each; "
    plots_help += "--tables may be given, too"
    parser.add_argument("--plots", action="store_true", help=plots_help)
    clean_help = "only list runs, checkpoints and caches with their sizes, or remove each DIR; one "
    clean_help += "that a run below outputs/ uses stays, runs elsewhere are not looked at"
    parser.add_argument("--clean", action="store_true", help=clean_help)
    board_help = "only start TensorBoard, with runs named by their differences (default: outputs)"
    parser.add_argument("--tensorboard", action="store_true", help=board_help)
    arguments, tensorboard_options = parser.parse_known_args(argv)
    if tensorboard_options and not arguments.tensorboard:
        parser.error(f"unrecognized arguments: {' '.join(tensorboard_options)}")
    writes = arguments.tables or arguments.plots
    if sum(map(bool, (writes, arguments.clean, arguments.tensorboard))) > 1:
        parser.error("--clean and --tensorboard exclude each other, and --tables or --plots")
    if arguments.plots and arguments.out and not arguments.tables:
        parser.error("--plots writes to DIR/debug/plots, without --out")
    if arguments.clean and arguments.out:
        parser.error("--clean writes nothing, without --out")
    if not (arguments.folders or arguments.tensorboard or arguments.clean):
        parser.error("the following arguments are required: DIR")
    arguments.options = tensorboard_options  # passed to TensorBoard, e.g. --port=6007
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns an exit code as in `runner.core.errors`."""
    prepare_streams()
    with current_folder_last():  # the current folder must not shadow an installed package
        from runner.core.record.console import close_logging
        from runner.core.record.text import escape_control_chars

        try:
            arguments = _parse_arguments(sys.argv[1:] if argv is None else argv)
            if arguments.tensorboard:
                from runner.measure.tensorboard_server import serve

                return serve(arguments.folders or [Path("outputs")], arguments.options)
            if arguments.clean:
                return _clean(arguments.folders)
            if not (arguments.plots or arguments.tables):
                return _compare(arguments)
            if arguments.plots:
                _write_plots(arguments.folders)
            return _write_tables(arguments) if arguments.tables else 0
        except RunnerError as error:
            write_stream(sys.stderr, f"error: {escape_control_chars(str(error))}\n")
            return error.exit_code
        except KeyboardInterrupt:
            return 130
        finally:
            close_logging()


def _compare(arguments: argparse.Namespace) -> int:
    from runner.core.record.console import print_stdout, set_up_logging
    from runner.measure.comparison import relocate_folders
    from runner.measure.discover import compare_folders
    from runner.measure.page import write_comparison
    from runner.measure.table import ComparisonScreen

    set_up_logging("info", None)
    folders = list(dict.fromkeys(arguments.folders))
    out: Path = arguments.out or (folders[0] if len(folders) == 1 else _default_output_folder())
    comparison = relocate_folders(compare_folders(folders), out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: not a folder")
    written = write_comparison(comparison, out)
    print_stdout(ComparisonScreen(comparison), crop=False)
    return 0 if written else 5


def _write_tables(arguments: argparse.Namespace) -> int:
    from rich.text import Text

    from runner.core.format import short_path
    from runner.core.record.console import print_stdout, set_up_logging
    from runner.measure.run_tables import FOLDER, write_tables

    set_up_logging("info", None)
    folders = list(dict.fromkeys(arguments.folders))
    default = folders[0] / FOLDER if len(folders) == 1 else _default_output_folder() / "tables"
    out: Path = arguments.out or default
    written, notes = write_tables(folders, arguments.tables, out)
    for line in (f"{short_path(out)}: {', '.join(written) or 'no table'}", *notes):
        print_stdout(Text(line), fold=False)
    return 0


def _write_plots(folders: list[Path]) -> None:
    from rich.text import Text

    from runner.core.format import short_path
    from runner.core.record.console import print_stdout, set_up_logging
    from runner.core.record.storage import guard_folder
    from runner.measure.run_plots import FOLDER, write_plots
    from runner.measure.run_tables import require_runs

    set_up_logging("info", None)
    for folder in [run for each in folders for run in require_runs(each)]:
        guard_folder(folder)
        try:
            pictures, notes = write_plots(folder)
        except OSError as error:
            problem = f"{folder}: not written: {error.strerror or error}"
            raise StorageError(problem) from error
        names = ", ".join(f"{name}.svg" for name in pictures) or "no plot"
        for line in (f"{short_path(folder / FOLDER)}: {names}", *notes):
            print_stdout(Text(line), fold=False)


def _clean(paths: list[Path]) -> int:
    from rich.text import Text

    from runner.core.format import count_noun, size
    from runner.core.record.console import print_stdout, set_up_logging
    from runner.measure.clean import entry_lines, list_entries, remove

    set_up_logging("info", None)
    entries = remove(paths) if paths else list_entries()
    for line in entry_lines(entries) if entries else ():
        print_stdout(Text(line), soft_wrap=True)  # a path is never cut, to be copied
    total = f"{count_noun(len(entries), 'folder')}, {size(sum(e.bytes for e in entries))}"
    verb = "removed" if paths else "found; to remove some: python -m runner.report --clean PATH…"
    print_stdout(Text(f"{total} {verb}"), fold=False)
    if not paths:
        print_stdout(Text("users are looked for among the runs below outputs/ alone"), fold=False)
    return 0


def _default_output_folder() -> Path:
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("outputs", "comparisons", f"{now}-{secrets.token_hex(3)}")


if __name__ == "__main__":
    sys.exit(main())
