"""`python -m runner`: runs a command line and returns an exit code."""

from __future__ import annotations

import os
import sys

from runner.core.errors import DISTRIBUTION, RunnerError, SweepFailed
from runner.core.module_path import current_folder_last
from runner.core.standard_streams import prepare_streams, write_stream

UNSUPPORTED_PYTHON = (3, 14)


def main() -> int:
    """Run the command line; return an exit code of `runner.core.errors`."""
    prepare_streams()
    code = 1
    try:
        code = _main(sys.argv[1:])
    except BaseException as error:
        code = _print_known_error(error)
    finally:
        write_stream(sys.stdout)
        write_stream(sys.stderr)
        if "torch" in sys.modules:  # else no user code has run
            _report_remaining(code)
    return code


def _report_remaining(code: int) -> None:
    """Name what user code has left, if the interpreter waits for it."""
    import multiprocessing
    import threading

    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    if len(threads) > 1 or multiprocessing.active_children():
        from runner.core.device.remaining import report_remaining  # imported only if needed

        report_remaining(code)


def _print_known_error(error: BaseException) -> int:
    """Print one line for an error and return its exit code; other errors are raised."""
    if isinstance(error, RunnerError):
        # of the processes of torchrun or srun only one prints: all have the same error
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            _print_error(str(error), multiline=isinstance(error, SweepFailed))
        else:  # torchrun ends all when the first one ends, also the one that prints
            import signal
            import time

            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5.0)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError):  # our own imports; a run reports its own
        if (package := (error.name or "runner").partition(".")[0]) != "runner":
            _print_error(f"{package} is not installed for {sys.executable}; {_install_hint()}")
            return 2
    if isinstance(error, KeyboardInterrupt):
        from runner.core.device.signals import interruption_before_run

        interrupted = interruption_before_run(error, " before the run started")
        _print_error(str(interrupted))
        return interrupted.exit_code
    if isinstance(error, FileNotFoundError):
        from runner.core.errors import StorageError
        from runner.core.record.text import WORKING_FOLDER_REMOVED, is_working_folder_removed

        if is_working_folder_removed(error):
            _print_error(WORKING_FOLDER_REMOVED)
            return StorageError.exit_code
    if isinstance(error, BrokenPipeError):  # `| head` has read enough
        return 0
    raise error


def _install_hint() -> str:
    """Return the command that makes the missing packages available."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    script = os.path.join(root, ".venv", "bin", "activate")
    if os.path.exists(script) and sys.prefix != os.path.join(root, ".venv"):
        return f"activate the environment that has it: . {script}"
    if os.path.exists(os.path.join(root, "pyproject.toml")):
        return f"install what is needed: pip install -c constraints.txt -e {root}"
    return f"install what is needed: {sys.executable} -m pip install {DISTRIBUTION}"


def _main(argv: list[str]) -> int:
    """Parse, validate, run. Imports are lazy so that `--help` and config errors stay fast."""
    if sys.version_info >= UNSUPPORTED_PYTHON:
        version = ".".join(str(part) for part in sys.version_info[:2])
        _print_error(f"hydra 1.3 does not start on Python {version}; use Python 3.11, 3.12 or 3.13")
        return 2
    # its modules must not shadow installed ones; a trusted class restores it
    with current_folder_last(restore=False):
        from runner.core.device.signals import raise_on_signals, raise_received

        with raise_on_signals():
            from runner.cli.arguments import read_arguments

            arguments = read_arguments(argv)
            if arguments.help or arguments.version:
                from runner.cli.help import help_text, version_text

                write_stream(sys.stdout, help_text() if arguments.help else version_text())
                return 0
            from runner.cli.typos import find_typo

            if not arguments.config_flags() and (typo := find_typo(arguments.overrides)):
                raise typo
            from runner.cli.preflight import check

            request = check(arguments)  # without torch or folders, so that errors are immediate
            raise_received()
    with raise_on_signals():
        from runner.cli.launch import launch

        raise_received()
        return launch(request)


def _print_error(message: str, multiline: bool = False) -> None:
    """Print an error with control characters escaped; `multiline` keeps our own line breaks."""
    from runner.core.masking import mask_secrets
    from runner.core.record.text import escape_control_chars, escape_lines

    escape = escape_lines if multiline else escape_control_chars
    write_stream(sys.stderr, f"error: {escape(mask_secrets(message))}\n")


if __name__ == "__main__":
    sys.exit(main())
