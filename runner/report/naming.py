"""What to call rows: by what differs between them, and by nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix

from runner.data.config import LOADING
from runner.overrides.groups import as_typed

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

    Where one key differs, its value (`ultra`), or `lr=0.1` where a value alone says nothing; else
    `key=value` for each key that does. Rows that are alike are told apart by `places`, their
    folders.
    """
    typed = [keys([as_typed(override) for override in row]) for row in rows]
    varied = _varied(typed)
    if len(varied) == 1:
        made = _values(varied[0].rpartition(".")[2], [row.get(varied[0]) for row in typed])
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


def labels(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many letters that differ as the names do, for the room in a chart.

    Longer ones lose what says least: what keys lie in, then the keys that all of them have, then
    what is alike at both ends.
    """
    made = list(names)
    for shorter in (_of_leaves, _of_values, _of_middles):
        if max(map(len, made), default=0) <= most:
            break
        fewer = shorter(made)
        made = fewer if len(set(fewer)) == len(set(names)) else made
    return made


def shorten_middle(name: str, most: int) -> str:
    """A name with its middle left out where it is longer than that."""
    if len(name) <= most:
        return name
    return f"{name[: most // 2]}…{name[len(name) - (most - most // 2 - 1) :]}"


def _of_leaves(names: Sequence[str]) -> list[str]:
    """`optimizer.lr=0.1` as `lr=0.1`."""
    return [re.sub(r"(^| )[\w.]*\.(?=\w+=)", r"\1", name) for name in names]


def _of_values(names: Sequence[str]) -> list[str]:
    """`lr=0.1 seed=1` as `0.1 1`, where all have these keys."""
    split = [[word.rpartition("=") for word in name.split(" ")] for name in names]
    alike = len({tuple(key for key, _, _ in words) for words in split}) == 1
    return [" ".join(word[2] for word in words) for words in split] if alike else list(names)


def _of_middles(names: Sequence[str]) -> list[str]:
    """Whole words that all of them begin or end with, as one `…` each."""
    start = len(re.sub(r"[A-Za-z0-9.]*$", "", commonprefix(names)))
    rest = [name[start:] for name in names]
    end = len(re.sub(r"[A-Za-z0-9.]*$", "", commonprefix([name[::-1] for name in rest])))
    before, after = "…" if start else "", "…" if end else ""
    return [f"{before}{name[: len(name) - end]}{after}" for name in rest]


def about_speed(rows: Iterable[Sequence[str]]) -> bool:
    """Whether what sets rows of overrides apart is how they compute, not what they train."""
    varied = _varied([keys(row) for row in rows])
    return not varied or any(
        key.partition(".")[0] in ("optimization", "device")
        or (key.startswith("data.") and key.removeprefix("data.") in LOADING)
        for key in varied
    )


def _varied(typed: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which rows differ, as first typed."""
    every = dict.fromkeys(key for row in typed for key in row)
    return [key for key in every if len({row.get(key) for row in typed}) > 1]


def _values(key: str, values: Sequence[str | None]) -> list[str]:
    """Names of rows by the values of one key: words speak for themselves, numbers do not."""
    bare = all(value is None or _is_word(value) for value in values)
    return [DEFAULT if value is None else value if bare else f"{key}={value}" for value in values]


def _is_word(value: str) -> bool:
    """Whether it is not a number, a boolean or nothing, as YAML has them."""
    if value.lower() in ("true", "false", "null", "~", ""):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


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
