"""The config groups as they lie on disk: which options there are, and what each is for."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parents[1]
CONF = next(  # inside the package in a wheel, beside it in a checkout
    (path for path in (_HERE / "conf", _HERE.parent / "conf") if (path / "config.yaml").is_file()),
    _HERE.parent / "conf",
)
ALIASES = {"optimization_level": "optimization", "debug_mode": "debug"}
"""Other spellings of groups."""
FOREIGN = ("data", "model", "objective")
"""Groups where `_target_` may name a class of the user's own."""
ARGUMENT = re.compile(
    rf"^(\+{{1,2}}(?:{'|'.join(FOREIGN)})\.)arguments\.(?!(?:_target_|arguments|kind)\b)"
)


def as_typed(override: str) -> str:
    """`+model.width=64` of `+model.arguments.width=64`, which is what a foreign class gets."""
    return ARGUMENT.sub(r"\1", override)


def options(*more: Path) -> dict[str, dict[str, str]]:
    """Every group and, by name, its options with the first line of comment in their files.

    `more` are folders with groups besides ours.
    """
    found: dict[str, dict[str, str]] = {}
    for path in (path for folder in (CONF, *more) for path in sorted(folder.glob("*/*.yaml"))):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next((line for line in lines if not line.startswith("# @")), "")  # Hydra's header
        found.setdefault(path.parent.name, {})[path.stem] = first.removeprefix("#").strip()
    return found


def chosen() -> dict[str, str]:
    """Each group's option where none is named, in the order of config.yaml."""
    defaults: dict[str, str] = {}
    for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines():
        group, colon, option = line.partition("#")[0].strip().removeprefix("- ").partition(": ")
        if line.startswith("  - ") and colon and (CONF / group).is_dir() and group.isidentifier():
            defaults[group] = option.strip()
    return defaults
