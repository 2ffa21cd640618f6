"""States saved with parameter names, brought into the order of another optimizer's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from runner.core.optim.optimizer import OPTIONS_OF_THIS_RUN
from runner.core.optim.optimizer_state import has_config_precedence, has_torch_form, is_equal

Names = list[list[str]]
"""Of each parameter: its names in the model, several if it is tied, none if it is not in it."""
MISSING = object()


def reorder_state(
    update: dict[str, Any],
    names: Names,
    optimizer: Optimizer,
    constructed: list[dict[str, Any]],
    own_keys: frozenset[str],
) -> dict[str, Any]:
    """Return a saved state in the order of `names` and in the groups of `optimizer`.

    Values of a group follow its weights, except `own_keys`, which this run sets. A state without
    names, of an earlier version, is returned as it is; a state that is not in torch's form, or of
    parameters outside the model, must have been saved in the same order. Raises ValueError.
    """
    saved_names, state = update.get("names"), update["optimizer"]
    if saved_names is None:
        return update
    saved_groups, groups = state.get("param_groups"), optimizer.param_groups
    if not has_torch_form(state, len(saved_names)) or [] in names or [] in saved_names:
        _check_same_order(saved_names, names)
        return update
    origins = _match(saved_names, names)
    sizes = [[len(group["params"]) for group in side] for side in (saved_groups, groups)]
    if origins == list(range(len(names))) and sizes[0] == sizes[1]:
        return update
    group_of = [n for n, size in enumerate(sizes[0]) for _ in range(size)]
    new_groups, new_options, end = list[dict[str, Any]](), list[dict[str, Any]](), 0
    for own, options, size in zip(groups, constructed, sizes[1], strict=True):
        members, end = range(end, end + size), end + size
        firsts: dict[int, int] = {}  # by saved group: the first of its weights that is a member
        for i in members:
            firsts.setdefault(group_of[origins[i]], i)
        values = [
            _restored_values(saved_groups[n], own, options, update["options"][n], own_keys)
            for n in firsts
        ]
        for other, i in zip(values[1:], [*firsts.values()][1:], strict=True):
            for key in sorted(other.keys() | values[0].keys()):
                if not is_equal(values[0].get(key, MISSING), other.get(key, MISSING)):
                    a, b = names[members[0]][0], names[i][0]
                    problem = f"{a} and {b} are in one group of the optimizer now"
                    raise ValueError(f"{problem}, but their saved groups differ in {key}")
        origin = next(iter(firsts), None)  # None: a group without weights
        group = own if origin is None else saved_groups[origin]
        new_groups.append({**group, "params": list(members)})
        new_options.append(options if origin is None else update["options"][origin])
    saved_state = state["state"]
    by_number = {i: saved_state[j] for i, j in enumerate(origins) if j in saved_state}
    reordered = {
        key: [update[key][j] for j in origins]
        for key in ("average", "training_weights")
        if update.get(key)
    }
    optimizer_state = {**state, "state": by_number, "param_groups": new_groups}
    return {**update, **reordered, "optimizer": optimizer_state, "options": new_options}


def _match(saved: Names, names: Names) -> list[int]:
    """Return each parameter's number in a saved state; ValueError if their sets differ."""
    numbers = {name: number for number, each in enumerate(saved) for name in each}
    origins: list[int] = []
    for each in names:
        candidates = {numbers[name] for name in each if name in numbers}
        if not candidates:
            raise ValueError(f"{each[0]} is trained now, but was not")
        if len(candidates) > 1 or candidates <= set(origins):
            raise ValueError(f"{each[0]} is tied to other weights than before")
        origins += candidates
    untrained = sorted(set(range(len(saved))) - set(origins))
    if untrained:
        raise ValueError(f"{saved[untrained[0]][0]} was trained, but is not now")
    return origins


def _check_same_order(saved: Names, names: Names) -> None:
    """Raise ValueError, naming the first difference, unless both are in the same order."""
    for number in range(max(len(saved), len(names))):
        pair = [side[number] if number < len(side) else None for side in (saved, names)]
        before, now = pair
        if before is None or now is None or (before != now and not set(before) & set(now)):
            texts = ["none" if e is None else (e or ["one outside the model"])[0] for e in pair]
            raise ValueError(
                f"parameter {number} of the optimizer was {texts[0]}, and is now {texts[1]}; this "
                "optimizer's state needs the same order"
            )


def _restored_values(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    constructed: Mapping[str, Any],
    saved_options: Mapping[str, Any],
    own_keys: frozenset[str],
) -> dict[str, Any]:
    """Return the values that a group would have after it was restored from `saved`."""
    values = dict(own)
    for key, value in saved.items():
        if not has_config_precedence(key, constructed, saved_options):
            values[key] = value
    return {k: v for k, v in values.items() if k not in own_keys | {"params", *OPTIONS_OF_THIS_RUN}}
