"""Points of a chart that lie on one another, so that their names would too."""

from __future__ import annotations

from collections.abc import Sequence


def together(places: Sequence[tuple[float, float]], near: float) -> list[list[int]]:
    """The points by number, those nearer than `near` to another's place, both ways, with it."""
    groups: list[list[int]] = []
    for i, (x, y) in enumerate(places):
        for group in groups:
            a, b = places[group[0]]
            if abs(x - a) < near and abs(y - b) < near:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups
