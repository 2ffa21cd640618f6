"""What the command line and the launcher tell each other; Hydra stands between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from runner.errors import UsageError
from runner.sweep.record import Job, Sweep


@dataclass
class Session:
    """A sweep that was asked for; the launcher notes in `sweep` how it goes."""

    folder: Path
    command: str  # as typed
    flags: list[str] = field(default_factory=list)  # Hydra's own that jobs need: --config-dir=…
    hash: str = ""  # of what was typed
    resumed: bool = False  # it was named to be gone on with, and may be anybody's
    sweep: Sweep | None = None
    left: list[Job] = field(default_factory=list)  # from before, and not asked for yet


_CURRENT: ContextVar[Session | None] = ContextVar("runner.sweep", default=None)


@contextmanager
def begun(session: Session) -> Iterator[Session]:
    """While entered, the launcher finds it."""
    token = _CURRENT.set(session)
    try:
        yield session
    finally:
        _CURRENT.reset(token)


def current() -> Session:
    """The sweep that was asked for. UsageError where it was not `python -m runner` that asked."""
    session = _CURRENT.get()
    if session is None:
        raise UsageError(
            "hydra/launcher=isolated: is for `python -m runner -m …`; use another launcher here"
        )
    return session
