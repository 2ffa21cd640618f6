"""Config groups on disk: their options, and the comment that describes each."""

from __future__ import annotations

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
CONF = next(  # inside the package in a wheel, beside it in a checkout
    (p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if (p / "config.yaml").is_file()),
    _PACKAGE.parent / "conf",
)
_LEVELS = dict.fromkeys(("optimization_level", "optimization_mode"), "optimization")
GROUP_ALIASES = {**_LEVELS, "debug_mode": "debug"}
"""Alternative names of groups. Options of these groups are typed in any case."""
REPLICATE_KEYS = {"seed": "seed", "data.fold": "fold", "data.split_seed": "split"}
"""Override keys that only distinguish replicates, and the noun for each."""
MIN_SIMILARITY = 0.75  # similarity above which two spellings count as one word
USER_CLASS_GROUPS = ("data", "model", "objective")
"""Groups in which `_target_` may name a user-defined class."""
ARGUMENT = re.compile(
    rf"^(\+{{1,2}}(?:{'|'.join(USER_CLASS_GROUPS)})\.)arguments\.(?!(?:_target_|arguments|kind)\b)"
)


def without_arguments(override: str) -> str:
    """Shorten `+model.arguments.width=64`, an argument of a user's class, to `+model.width=64`."""
    return ARGUMENT.sub(r"\1", override)


def group_options(*more: Path) -> dict[str, dict[str, str]]:
    """Return the options of every group, in ours and in `more`, with their first comments."""
    groups: dict[str, dict[str, str]] = {}
    for path in (path for folder in (CONF, *more) for path in sorted(folder.glob("*/*.yaml"))):
        # the check of files says what is wrong with another encoding
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
        first = next((line for line in lines if not line.startswith("# @")), "")  # Hydra's header
        groups.setdefault(path.parent.name, {})[path.stem] = first.removeprefix("#").strip()
    return groups


def default_options() -> dict[str, str]:
    """Return each group's default option, in the order of config.yaml."""
    defaults: dict[str, str] = {}
    for line in (CONF / "config.yaml").read_text(encoding="utf-8-sig").splitlines():
        group, colon, option = line.partition("#")[0].strip().removeprefix("- ").partition(": ")
        if line.startswith("  - ") and colon and (CONF / group).is_dir() and group.isidentifier():
            defaults[group] = option.strip()
    return defaults
