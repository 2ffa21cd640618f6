"""Name rows by the overrides in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from runner.data.config import LOADING
from runner.overrides.groups import without_arguments
from runner.record.hydra_files import overrides_by_key

DEFAULT = "default"
"""The name of a row that does not set the one key that the others set."""


def names(rows: Sequence[Sequence[str]], places: Sequence[str]) -> list[str]:
    """Return a distinct name for each row of overrides.

    If one key differs, its value (`ultra`), or `lr=0.1` if a value is not a word. If several
    differ, `lr=0.1 seed=2`, with a key's last part if that is unambiguous. Rows with equal
    overrides are distinguished by `places`, their folders.
    """
    typed = [overrides_by_key([without_arguments(override) for override in row]) for row in rows]
    varied = varied_keys(typed)
    ends = _shortest_ends(places)
    if not varied:
        made = list(ends)
    elif len(varied) == 1:
        made = _names_by_value(varied[0].rpartition(".")[2], [row.get(varied[0]) for row in typed])
    else:
        last = {key: key.rpartition(".")[2] for key in varied}
        often = Counter(last.values())
        short = {key: end if often[end] == 1 else key for key, end in last.items()}
        made = [
            " ".join(f"{short[key]}={row[key]}" for key in varied if key in row) for row in typed
        ]
    made = [name or DEFAULT for name in made]
    counts = Counter(made)
    made = [
        f"{name} ({end})" if counts[name] > 1 and end != name else name
        for name, end in zip(made, ends, strict=True)
    ]
    counts = Counter(made)
    return [f"{name} #{i}" if counts[name] > 1 else name for i, name in enumerate(made, 1)]


def about_speed(rows: Iterable[Sequence[str]]) -> bool:
    """Whether the rows differ in how they compute (or not at all), not only in what they train."""
    varied = varied_keys([overrides_by_key(row) for row in rows])
    return not varied or any(
        key.partition(".")[0] in ("optimization", "device")
        or (key.startswith("data.") and key.removeprefix("data.") in LOADING)
        for key in varied
    )


def varied_keys(typed: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys in which rows differ, in order of first occurrence."""
    keys = dict.fromkeys(key for row in typed for key in row)
    return [key for key in keys if len({row.get(key) for row in typed}) > 1]


def _names_by_value(key: str, values: Sequence[str | None]) -> list[str]:
    """Return the bare values if all are words, else `key=value`."""
    bare = all(value is None or _is_word(value) for value in values)
    return [DEFAULT if value is None else value if bare else f"{key}={value}" for value in values]


def _is_word(value: str) -> bool:
    """Whether YAML would not read it as a number, a boolean or null."""
    try:
        float(value)
    except ValueError:
        return value.lower() not in ("true", "false", "null", "~", "")
    return False


def _shortest_ends(places: Sequence[str]) -> list[str]:
    """Return the shortest path suffixes that distinguish the paths."""
    parts = [place.rstrip("/").split("/") for place in places]
    for length in range(1, max(map(len, parts), default=0) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(set(places)):
            return ends
    return list(places)
