"""The config groups as they lie on disk: their options, and the comment that describes each."""

from __future__ import annotations

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
CONF = next(  # inside the package in a wheel, beside it in a checkout
    (p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if (p / "config.yaml").is_file()),
    _PACKAGE.parent / "conf",
)
ALIASES = {"optimization_level": "optimization", "debug_mode": "debug"}
"""Other spellings of groups."""
SURE = 0.75  # similarity from which two spellings are taken for one word
FOREIGN = ("data", "model", "objective")
"""Groups where `_target_` may name a class of the user's own."""
ARGUMENT = re.compile(
    rf"^(\+{{1,2}}(?:{'|'.join(FOREIGN)})\.)arguments\.(?!(?:_target_|arguments|kind)\b)"
)


def without_arguments(override: str) -> str:
    """`+model.width=64` for `+model.arguments.width=64`, which is what a foreign class gets."""
    return ARGUMENT.sub(r"\1", override)


def options(*more: Path) -> dict[str, dict[str, str]]:
    """Every group of ours and of the folders in `more`: its options and their first comments."""
    groups: dict[str, dict[str, str]] = {}
    for path in (path for folder in (CONF, *more) for path in sorted(folder.glob("*/*.yaml"))):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next((line for line in lines if not line.startswith("# @")), "")  # Hydra's header
        groups.setdefault(path.parent.name, {})[path.stem] = first.removeprefix("#").strip()
    return groups


def default_options() -> dict[str, str]:
    """Each group's option where none is named, in the order of config.yaml."""
    defaults: dict[str, str] = {}
    for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines():
        group, colon, option = line.partition("#")[0].strip().removeprefix("- ").partition(": ")
        if line.startswith("  - ") and colon and (CONF / group).is_dir() and group.isidentifier():
            defaults[group] = option.strip()
    return defaults
