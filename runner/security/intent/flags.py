"""Hydra's own flags that bring a config of another folder along."""

from __future__ import annotations

from pathlib import Path

from runner.errors import SecurityError, UsageError
from runner.security.intent.said import Said


def check_folders(flags: dict[str, str | None], said: Said, ours: Path) -> dict[str, str]:
    """The folders that flags name, made absolute, as everybody reads them from the current one.

    Under strict only ours: a config says what is done with this machine.
    """
    found = {}
    for flag, text in flags.items():
        if text is None:
            continue
        if "://" in text:
            raise SecurityError(
                f"{flag}: {text} is refused: it would import a package; name a folder"
            )
        folder = Path(text).absolute()
        if not folder.is_dir():
            raise UsageError(f"{flag}: there is no folder {text}")
        _check_strict(f"{flag}={text}", folder, said, ours)
        found[flag] = str(folder)
    for text in said.searchpath:
        _check_strict("hydra.searchpath", Path(text.removeprefix("file://")), said, ours)
    return found


def _check_strict(what: str, folder: Path, said: Said, ours: Path) -> None:
    if said.strict and not folder.resolve().is_relative_to(ours.resolve()):
        raise SecurityError(
            f"{what}: is refused under security=strict: it takes no configs of other folders; "
            "type its keys, or look through it and use security=standard"
        )
