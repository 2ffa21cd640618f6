"""`python -m runner`: from the command line to an exit code."""

from __future__ import annotations

import os
import sys

from runner.errors import RunnerError, SweepFailed
from runner.module_path import current_folder_last

TOO_NEW = (3, 14)


def main() -> int:
    """Do what the command line asks for; the exit codes are those of `runner.errors`."""
    if sys.version_info >= TOO_NEW:
        version = ".".join(str(part) for part in sys.version_info[:2])
        _print_error(f"hydra 1.3 does not start on Python {version}; use Python 3.11, 3.12 or 3.13")
        return 2
    if sys.stdout is None:  # closed: no other file may be opened as descriptor 1
        sys.stdout = open(os.devnull, "w")
    try:
        code = _main(sys.argv[1:])
        _flush()
        return code
    except RunnerError as error:
        # of the processes that torchrun or srun has started, the others have the same mistake
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            _print_error(str(error), lines=isinstance(error, SweepFailed))
        else:  # the first to end has torchrun end the others, also the one that says why
            import signal
            import time

            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5.0)
        return error.exit_code
    except ModuleNotFoundError as error:  # of our own imports; a run reports its own
        if (package := (error.name or "runner").partition(".")[0]) == "runner":
            raise
        ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        fix = f"in {ours}: . .venv/bin/activate, or pip install -c constraints.txt -e ."
        _print_error(f"{package} is not installed for {sys.executable}; {fix}")
        return 2
    except KeyboardInterrupt as error:
        from runner.training.signals import interruption_before_run

        interrupted = interruption_before_run(error, " before anything was begun")
        _print_error(str(interrupted))
        return interrupted.exit_code
    except BrokenPipeError:  # `| head` has read enough
        _flush()
        return 0


def _main(typed: list[str]) -> int:
    """Parse, validate, run. Imports are lazy so that `--help` and config errors stay fast."""
    # a module there must not stand in for an installed one; a trusted class brings it back
    with current_folder_last(restore=False):
        from runner.training.signals import signals_unwind

        with signals_unwind():
            from runner.cli.arguments import read_arguments

            arguments = read_arguments(typed)
            if arguments.help or arguments.version:
                from runner.cli.help import help_text, version_text

                sys.stdout.write(help_text() if arguments.help else version_text())
                return 0
            from runner.cli.typos import find_typo

            if not arguments.config_flags() and (typo := find_typo(arguments.overrides)):
                raise typo
            from runner.cli.preflight import check

            request = check(arguments)  # no torch, no folder: a mistake is answered at once
    from runner.cli.launch import launch

    with signals_unwind():
        return launch(request)


def _flush() -> None:
    """Write out stdout, or drop what a closed pipe or a full disk refuses."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(message: str, lines: bool = False) -> None:
    """Print a message on one line, whatever names and values it quotes; `lines` are our own."""
    from runner.masking import masked
    from runner.record.text import escape_control_chars, escape_lines

    escape = escape_lines if lines else escape_control_chars
    sys.stderr.write(f"error: {escape(masked(message))}\n")


if __name__ == "__main__":
    sys.exit(main())
