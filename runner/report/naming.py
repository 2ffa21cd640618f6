"""What to call rows: by what differs between them, and by nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

DEFAULT = "default"
"""A row in which the one key that others set is not set."""


def keys(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides by key; the last one wins. `~key` is a key with the value "removed"."""
    found = {}
    for override in overrides:
        key, equals, value = str(override).partition("=")
        if key.startswith("~"):
            found[key.lstrip("~")] = "removed"
        elif equals:
            found[key.lstrip("+").partition("@")[0]] = value
    return found


def names(rows: Sequence[Sequence[str]], places: Sequence[str]) -> list[str]:
    """A name for each row of overrides, unlike the others' names.

    The value alone where one key differs (`ultra`), else `key=value` for each one that does; rows
    that are alike are told apart by `places`, their folders.
    """
    typed = [keys(row) for row in rows]
    every = dict.fromkeys(key for row in typed for key in row)
    varied = [key for key in every if len({row.get(key) for row in typed}) > 1]
    if len(varied) == 1:
        made = [row.get(varied[0], DEFAULT) for row in typed]
    else:
        made = [" ".join(f"{key}={row[key]}" for key in varied if key in row) for row in typed]
    short = _ends(places)
    if not varied:
        made = list(short)
    made = [name or DEFAULT for name in made]
    counts = Counter(made)
    made = [
        f"{name} ({end})" if counts[name] > 1 and end != name else name
        for name, end in zip(made, short, strict=True)
    ]
    return _numbered(made)


def _ends(places: Sequence[str]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [place.rstrip("/").split("/") for place in places]
    longest = max((len(part) for part in parts), default=1)
    for length in range(1, longest + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(set(places)):
            return ends
    return list(places)


def _numbered(made: list[str]) -> list[str]:
    counts, seen, names = Counter(made), Counter[str](), []
    for name in made:
        seen[name] += 1
        names.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
    return names
