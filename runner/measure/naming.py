"""Name rows by the overrides in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from runner.core.config.groups import without_arguments
from runner.core.record.hydra_files import overrides_by_key
from runner.core.record.text import limit_length
from runner.core.schemas.data import LOADING_KEYS

DEFAULT_NAME = "default"
"""The name of a row that does not set the one key that the others set."""
LONGEST_NAME = 300  # characters


def name_rows(rows: Sequence[Sequence[str]], folders: Sequence[str]) -> list[str]:
    """Return a distinct name for each row of overrides.

    If one key differs, its value (`ultra`), or `lr=0.1` if a value is not a word. If several
    differ, `lr=0.1 seed=2`, with a key's last part if that is unambiguous. Rows with equal
    overrides are distinguished by their `folders`.
    """
    overrides = [overrides_by_key([without_arguments(text) for text in row]) for row in rows]
    varied = varied_keys(overrides)
    suffixes = _shortest_suffixes(folders)
    if not varied:
        names = list(suffixes)
    elif len(varied) == 1:
        values = [row.get(varied[0]) for row in overrides]
        bare = all(value is None or _is_word(value) for value in values)
        prefix = "" if bare else f"{varied[0].rpartition('.')[2]}="
        names = ["" if value is None else prefix + value for value in values]
    else:
        last_parts = {key: key.rpartition(".")[2] for key in varied}
        part_counts = Counter(last_parts.values())
        short_keys = {key: x if part_counts[x] == 1 else key for key, x in last_parts.items()}
        names = [" ".join(f"{short_keys[k]}={r[k]}" for k in varied if k in r) for r in overrides]
    names = [limit_length(name or DEFAULT_NAME, LONGEST_NAME) for name in names]
    counts = Counter(names)
    names = [
        f"{name} ({suffix})" if counts[name] > 1 and suffix != name else name
        for name, suffix in zip(names, suffixes, strict=True)
    ]
    counts = Counter(names)
    return [f"{name} #{i}" if counts[name] > 1 else name for i, name in enumerate(names, 1)]


def compares_speed(rows: Iterable[Sequence[str]]) -> bool:
    """Whether the rows differ in how they compute (or not at all), not only in what they train."""
    varied = varied_keys([overrides_by_key(row) for row in rows])
    return not varied or any(map(changes_speed, varied))


def changes_speed(key: str) -> bool:
    """Whether the key is about how a run computes, rather than what it trains."""
    group, _, name = key.partition(".")
    computes = group in ("optimization", "device", "debug")
    return computes or (group == "data" and name in LOADING_KEYS)


def varied_keys(overrides: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys in which rows differ, in order of first occurrence."""
    keys = dict.fromkeys(key for row in overrides for key in row)
    return [key for key in keys if len({row.get(key) for row in overrides}) > 1]


def _is_word(value: str) -> bool:
    """Whether YAML would not read it as a number, a boolean or null."""
    try:
        float(value)
    except ValueError:
        return value.lower() not in ("true", "false", "null", "~", "")
    return False


def _shortest_suffixes(paths: Sequence[str]) -> list[str]:
    """Return the shortest path suffixes that distinguish the paths."""
    parts = [path.rstrip("/").split("/") for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        suffixes = ["/".join(part[-length:]) for part in parts]
        if len(set(suffixes)) == len(set(paths)):
            return suffixes
    return list(paths)
