"""`python -m runner.report`: see `command.py`."""

from __future__ import annotations

import sys

from runner.module_path import current_folder_last


def main() -> int:
    """Do what the command line asks for; the exit codes are those of `runner.errors`."""
    with current_folder_last():  # what lies there must not stand in for an installed package
        from runner.report.command import main as compare

    return compare()


if __name__ == "__main__":
    sys.exit(main())
