"""Where a run may write: under the output root, unless somebody typed another place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from runner.errors import SecurityError

ROOTS = ("outputs", "multirun")  # the second one is Hydra's own, for configs that name no other


class _Begun(NamedTuple):
    """What is gone on with, and the output roots, as seen from where the command was typed."""

    resumed: Path | None
    chosen: bool  # the folder to write to, by somebody
    own: list[Path]


_begun: ContextVar[_Begun | None] = ContextVar("_begun", default=None)


def roots() -> list[Path]:
    """Where everything is written: in the current folder, wherever they lead."""
    return [Path(os.path.realpath(name)) for name in ROOTS]


@contextmanager
def resumed_at(folder: Path | None, chosen: bool = True) -> Iterator[None]:
    """While entered, that folder is the one of a run that is resumed, and vouches for nothing.

    Nor does the folder of a job whose sweep is resumed: it was not `chosen`. The output roots are
    those of now, wherever a job goes.
    """
    token = _begun.set(_Begun(folder and folder.resolve(), chosen, roots()))
    try:
        yield
    finally:
        _begun.reset(token)


def own_trees(folder: Path | None) -> list[Path]:
    """The folders of this run tree: what lies there was written by us.

    These are the output roots, and for a run in a folder that somebody chose, the nearest `outputs`
    above it, or itself. A run or sweep that is resumed by its path may be anybody's, and is none of
    them.
    """
    begun = _begun.get() or _Begun(None, True, roots())
    if folder is None or not begun.chosen or folder.resolve() == begun.resumed:
        return begun.own
    place = folder.absolute()
    return [*begun.own, next((p for p in (place, *place.parents) if p.name == "outputs"), place)]


def check_place(
    key: str, value: object, allowed: tuple[Path, ...] = (), strict: bool = False
) -> None:
    """Raise SecurityError for a path that leads out of the output root and of `allowed`.

    Symbolic links are followed, those on the way too.
    """
    text = str(value)
    try:
        path = Path(os.path.realpath(text))
    except (OSError, ValueError) as error:
        raise SecurityError(f"{key}: {text!r} is no path: {error}") from error
    if any(path.is_relative_to(folder) for folder in (*roots(), *allowed)):
        return
    where = f", which is {path}" if str(path) != text else ""
    who = "security=strict" if strict else "a config"
    way = "use a folder in there" if strict else f"if you mean it, type {key}=…"
    raise SecurityError(
        f"{key}: {text}{where} is refused: {who} writes nothing outside {roots()[0]}; {way}"
    )


def check_below(key: str, inside: str, folder: Path) -> None:
    """Raise SecurityError for a path in a folder that leads out of it, or is the folder itself."""
    home, path = (os.path.realpath(one) for one in (folder, folder / inside))
    if home not in (str(parent) for parent in Path(path).parents):
        raise SecurityError(
            f"{key}: {inside} is refused: it is the name of a job's folder in {folder}"
        )


def typed_place(text: str) -> Path | None:
    """The folder that a typed path lies in for certain, whatever its references come to.

    None where all of it is a reference.
    """
    fixed = text.partition("${")[0]
    if fixed == text:
        return Path(os.path.realpath(text))
    folder = fixed.rpartition("/")[0] if "/" in fixed else ""
    if fixed.startswith("/"):
        folder = folder or "/"
    return Path(os.path.realpath(folder)) if folder else None
