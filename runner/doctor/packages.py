"""Whether the packages that are installed are those that the project needs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "runner"
Waiting = tuple[Requirement, str, tuple[str, ...]]  # what, who needs it, with which extras
SHOWN = (
    "torch", "hydra-core", "omegaconf", "tensorboard", "numpy", "safetensors", "rich", "psutil",
    "matplotlib", "Pillow", "pyarrow", "triton",
)  # fmt: skip


@dataclass(frozen=True)
class Unmet:
    """A requirement that does not hold here."""

    requirement: str  # such as numpy>=1.26
    needed_by: str
    found: str | None  # the version that is there; None: not installed


def versions() -> dict[str, str | None]:
    """The packages that decide how a run goes; None for one that is not installed."""
    return {name: _version(name) for name in SHOWN}


def declared() -> tuple[list[str], str]:
    """What the project requires and its Python range, from the checkout or the installed wheel.

    Both are empty where neither says, such as a folder that was only copied.
    """
    try:
        file = Path(__file__).parents[2] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == PROJECT:
            return list(project["dependencies"]), str(project["requires-python"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        pass
    try:
        python = metadata.metadata(PROJECT)["Requires-Python"]
        return metadata.requires(PROJECT) or [], str(python or "")
    except metadata.PackageNotFoundError:
        return [], ""


def unmet(requirements: Iterable[str], needed_by: str = PROJECT) -> list[Unmet]:
    """Those that do not hold, here or in what they require in turn, optional extras left out."""
    queue: list[Waiting] = [(Requirement(text), needed_by, ("",)) for text in requirements]
    found: list[Unmet] = []
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while queue:
        need, asker, extras = queue.pop()
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        there = _version(need.name)
        if there is None or not need.specifier.contains(there, prereleases=True):
            found.append(Unmet(f"{need.name}{need.specifier}", asker, there))
            continue
        name, asked = canonicalize_name(need.name), ("", *sorted(need.extras))
        if (name, asked) not in seen:
            seen.add((name, asked))
            queue += [(Requirement(text), name, asked) for text in metadata.requires(name) or []]
    return sorted(set(found), key=lambda one: (one.requirement, one.needed_by))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
