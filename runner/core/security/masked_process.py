"""Processes that mask from their first line on what the process that starts them masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from traceback import format_exception
from types import TracebackType
from typing import Any

from runner.core.masking import mask_secrets
from runner.core.security.secrets import adopt_masking_state, masking_state


class MaskingState:
    """What this process masks. Unpickled in a new process, it makes that one mask the same.

    It must be the process's first argument: others may run the user's code when unpickled. It is
    sent through the pipe that starts the process; a fork needs none.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _adopt, masking_state()


def _adopt(*state: Any) -> MaskingState:
    adopt_masking_state(*state)
    sys.excepthook = _print_masked  # of errors while the other arguments are unpickled
    return MaskingState()


def run_masked(_: MaskingState, main: Callable[..., object], *arguments: Any) -> None:
    """Call `main`; target of all processes that multiprocessing starts. It prints no secrets."""
    try:
        main(*arguments)
    except BaseException as error:
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise
        _print_masked(type(error), error, error.__traceback__)
        sys.exit(1)


def _print_masked(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(mask_secrets("".join(format_exception(kind, error, trace))))
