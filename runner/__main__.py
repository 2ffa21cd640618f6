"""`python -m runner`: from what was typed to an exit code."""

from __future__ import annotations

import os
import sys

from runner.errors import RunnerError, SweepFailed
from runner.module_path import current_folder_last

TYPE_CHECKING = False  # that of typing, which is not imported yet
if TYPE_CHECKING:
    from runner.cli.preflight import Request

TOO_NEW = (3, 14)


def main() -> int:
    """Do what the command line asks for; the exit codes are those of `runner.errors`."""
    if sys.version_info >= TOO_NEW:
        found = ".".join(str(part) for part in sys.version_info[:2])
        _say(f"hydra 1.3 does not start on Python {found}; use Python 3.11, 3.12 or 3.13")
        return 2
    try:
        code = _main(sys.argv[1:])
        sys.stdout.flush()
        return code
    except RunnerError as error:
        _say(str(error), lines=isinstance(error, SweepFailed))
        return error.exit_code
    except KeyboardInterrupt as error:
        from runner.training.signals import interruption_before_run

        interrupted = interruption_before_run(error, " before anything was begun")
        _say(str(interrupted))
        return interrupted.exit_code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(typed: list[str]) -> int:
    """The story. Imports wait for their turn, so that an answer comes as soon as it is known."""
    # what lies there must not stand in for what is installed; a trusted class brings it back
    with current_folder_last(put_back=False):
        from runner.training.signals import sigterm_unwinds

        with sigterm_unwinds():
            request = _asked(typed)
    if request is None:
        return 0
    from runner.cli.launch import launch

    with sigterm_unwinds():
        return launch(request)


def _asked(typed: list[str]) -> Request | None:
    """What is to be done, checked; None where an answer was all that was wanted."""
    from runner.cli.arguments import read_arguments

    arguments = read_arguments(typed)
    if arguments.help or arguments.version:
        from runner.cli.help import help_text, version_text

        sys.stdout.write(help_text() if arguments.help else version_text())
        return None

    from runner.cli.preflight import check

    return check(arguments)  # no torch, no folder: a mistake is answered at once


def _say(message: str, lines: bool = False) -> None:
    """On one line, whatever names and values are in it; `lines` are made by the runner itself."""
    from runner.masking import masked
    from runner.record.text import escape_control_chars, escape_lines

    sys.stderr.write(
        f"error: {(escape_lines if lines else escape_control_chars)(masked(message))}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
