"""Optimizer state: checks before loading, order by parameter names, layout for fused kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.core.errors import CheckpointError
from runner.core.optim.optimizer import (
    OPTIONS_OF_THIS_RUN,
    combined_parts,
    fill_momentum,
    is_torch_class,
    iterate_weights,
)
from runner.core.security.files.encode import encode

MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"})
"""State that fused kernels access at the weight's size without checking it."""
OPTION_OF = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
"""State that exists only while an option is on; torch creates a missing momentum itself."""
Names = list[list[str]]
"""Of each parameter: its names in the model, several if it is tied, none if it is not in it."""
MISSING = object()


def restore_options(
    groups: list[dict[str, Any]],
    current_groups: list[dict[str, Any]],
    constructed: list[dict[str, Any]],
    saved: list[dict[str, Any]] | None,
) -> None:
    """Complete loaded `groups`: they keep what the optimizer counts in them (Prodigy's `d`).

    The config has precedence where it changed: where the `constructed` option differs from the one
    `saved` (None: not recorded by older checkpoints, so all options are taken from the config).
    """
    saved = saved or [{} for _ in groups]
    rows = zip(groups, current_groups, constructed, saved, strict=True)
    for group, current, options, before in rows:
        for key, value in current.items():
            if key not in group or has_config_precedence(key, options, before):
                group[key] = value
            elif isinstance(value, Tensor) and isinstance(group[key], Tensor):
                group[key] = group[key].to(value.device)  # torch moves only the state


def has_config_precedence(
    key: str, constructed: Mapping[str, Any], saved: Mapping[str, Any]
) -> bool:
    """Whether a group's value is this run's own, rather than the checkpoint's."""
    if key in OPTIONS_OF_THIS_RUN:
        return True
    is_same = key in saved and key in constructed and is_equal(encode(constructed[key]), saved[key])
    return key in constructed and not is_same


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values of a group are equal, also as tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())  # host sync: where a state is loaded
    return bool(a == b)  # host sync: none, plain values


def compatible_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a `state_dict` that the optimizer can continue from.

    State of an option that is now off is left out. Of a user's class only the tensors of its torch
    base class are checked, and a state in another form than torch's is returned as it is. Raises
    ValueError.
    """
    if not is_torch_class(type(optimizer)) and not has_torch_form(saved):
        return dict(saved)
    saved_groups, groups = saved["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in side] for side in (saved_groups, groups)]
    if (parts := combined_parts(optimizer)) and sizes[0] == sizes[1]:
        combined: Any = optimizer
        states = map(compatible_state, parts, combined.split_state(saved))
        return {**saved, **combined.join_states([*states])}
    if torch_base(optimizer) is None or sizes[0] != sizes[1]:  # torch itself refuses other sizes
        return dict(saved)
    numbers = [number for group in saved_groups for number in group["params"]]
    if numbers != list(range(len(numbers))) or not saved["state"].keys() <= set(numbers):
        raise ValueError("an optimizer's state must be keyed by parameter numbers")
    if is_torch_class(type(optimizer)):
        _check_saved_options(optimizer, saved_groups)
    state: dict[int, Any] = {}
    for number, (group, weight) in zip(numbers, iterate_weights(optimizer), strict=True):
        entries = saved["state"].get(number, {})
        if not isinstance(entries, Mapping):
            raise ValueError(f"the state of a weight is a {type(entries).__name__}")
        if is_torch_class(type(optimizer)):
            entries = _select_entries(optimizer, group, weight, entries)
        check_tensors(optimizer, weight, entries)
        if entries:
            state[number] = dict(entries)
    return {**saved, "state": state}


def has_torch_form(state: Mapping[str, Any], count: int | None = None) -> bool:
    """Whether it is a `state_dict` as torch's Optimizer has it, of `count` parameters if given."""
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        return False
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        return False
    numbers = [number for group in groups for number in group["params"]]
    expected = list(range(len(numbers) if count is None else count))
    return numbers == expected and entries.keys() <= set(numbers)


def check_saved_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError, at a save, for a state that `compatible_state` would refuse."""
    try:
        compatible_state(optimizer, state)
    except (KeyError, TypeError, ValueError) as error:
        name = type(optimizer).__name__
        problem = f"the state of {name} cannot be saved, as it could not be resumed: {error}"
        raise CheckpointError(f"{problem}; use checkpoint=off to train without") from error


def check_optimizer_state(optimizer: Optimizer) -> None:
    """Raise ValueError if state does not have the shape of its weight."""
    for part in combined_parts(optimizer):
        check_optimizer_state(part)
    if torch_base(optimizer) is not None:
        for _, weight in iterate_weights(optimizer):
            check_tensors(optimizer, weight, optimizer.state.get(weight, {}))


def check_tensors(optimizer: Optimizer, weight: Tensor, entries: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors of a shape or dtype that this weight's state cannot have."""
    is_user_class = not is_torch_class(type(optimizer))
    if torch_base(optimizer) is torch.optim.Adafactor:  # state by rows and columns; no fused kernel
        return
    for name, value in entries.items():
        is_unknown = name not in MOMENTS or not isinstance(value, Tensor)
        if value is None or (is_user_class and is_unknown):
            continue
        if name == "step" and type(value) is int and isinstance(optimizer, torch.optim.SparseAdam):
            value = torch.tensor(value)  # host sync: none, on the host
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not is_dense and not _is_sparse_momentum(optimizer, weight, value):
            raise ValueError(f"{name} is not a dense tensor")
        if value.shape != weight.shape and (value.ndim or name in MOMENTS):
            raise ValueError(f"{name} must have its weight's shape, {list(weight.shape)}")
        kinds = [(t.is_floating_point(), t.is_complex()) for t in (value, weight)]
        if name in MOMENTS and (kinds[0] != kinds[1] or value.itemsize < 2):
            raise ValueError(f"{name} is of {value.dtype}")
        # host sync: the counters of a loaded state
        if name == "step" and not (value.numel() == 1 and 0 <= float(value) < math.inf):
            raise ValueError("an optimizer's step must be one number ≥ 0")


def _is_sparse_momentum(optimizer: Optimizer, weight: Tensor, value: Any) -> bool:
    """Whether it is SGD's momentum of sparse gradients, which no fused kernel accesses."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_sparse = isinstance(value, Tensor) and value.layout is torch.sparse_coo
    return is_sgd and not is_fused and is_sparse and value.shape == weight.shape


def torch_base(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of torch.optim that it is or derives from, or None."""
    classes = (cls for cls in type(optimizer).__mro__ if cls is not Optimizer)
    return next((c for c in classes if c is getattr(torch.optim, c.__name__, None)), None)


def _check_saved_options(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for options of another class; torch versions only add options to a class."""
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        saved_keys, keys = saved.keys() - {"initial_lr"}, group.keys() - {"initial_lr"}
        if not (saved_keys <= keys or keys <= saved_keys):
            missing, name = ", ".join(sorted(saved_keys - keys)), type(optimizer).__name__
            raise ValueError(f"saved by another optimizer: {name} has no {missing}")


def _select_entries(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of options that are on; ValueError if a needed one is missing."""
    on = {key for key in entries if group.get(OPTION_OF.get(key, ""), True)}
    entries = {k: v for k, v in entries.items() if v is not None and k in on}
    needed = {name for name, option in OPTION_OF.items() if group.get(option)}
    needed |= optimizer.state[weight].keys() if weight in optimizer.state else set()
    missing = sorted(needed - {"momentum_buffer"} - entries.keys())
    if entries and missing:
        raise ValueError(f"{type(optimizer).__name__}: {', '.join(missing)} is missing")
    return entries


def align_state(optimizer: Optimizer) -> None:
    """Convert loaded state to the layout that an update assumes.

    Moments get their weight's strides (for fused kernels), counters move to the device for updates
    without a host sync, and fused SGD gets missing momentum buffers.
    """
    for group, weight in iterate_weights(optimizer):
        on_device = group.get("fused") or group.get("capturable")
        state = optimizer.state.get(weight, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            dense = value.layout is torch.strided and value.shape == weight.shape
            if dense and value.stride() != weight.stride():
                state[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            elif on_device and value.device != weight.device:
                state[key] = value.to(weight.device)
    fill_momentum(optimizer)


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
        saved = [(saved_groups[n], update["options"][n]) for n in firsts]
        values = [_restored_values(g, own, options, before, own_keys) for g, before in saved]
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
    by_weight = [key for key in ("average", "training_weights") if update.get(key)]
    reordered = {key: [update[key][j] for j in origins] for key in by_weight}
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
            change = f"parameter {number} of the optimizer was {texts[0]}, and is now {texts[1]}"
            raise ValueError(f"{change}; this optimizer's state needs the same order")


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
