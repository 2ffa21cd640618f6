"""Loading of the buffers that a model's state dict has not, or not in their first shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.core.optim.buffers import (
    OBJECTIVE,
    BufferSnapshot,
    named_modules,
    same_values,
)


def load_buffers(
    snapshot: BufferSnapshot, changed: Mapping[str, Any], model: Mapping[str, Any]
) -> None:
    """Prepare the buffers for loading a state_dict `model`, saved with `snapshot.changed()`.

    Those that had not changed then get their first values.
    """
    modules = dict(named_modules(snapshot.model, snapshot.objective))
    for name, entry in {**_first_values(snapshot), **changed}.items():
        path, _, key = name.rpartition(".")
        if path.startswith(OBJECTIVE) and path not in modules:
            continue  # of another objective
        buffers = modules[path]._buffers
        is_new, current = key not in buffers, buffers.get(key)
        if (None if current is None else [*current.shape]) != entry["was"]:
            continue  # of another model: loading reports it
        value = model.get(name) if entry["value"] is None else entry["value"]
        if value is None or entry["shape"] is None:
            buffers[key] = None
            continue
        if current is not None and same_values(value, current):
            continue
        device = snapshot.device if current is None else current.device
        buffers[key] = value.to(device, copy=True)
        if is_new and entry["value"] is not None:
            modules[path]._non_persistent_buffers_set.add(key)


def _first_values(snapshot: BufferSnapshot) -> dict[str, Any]:
    """Return the first values of the buffers whose values `changed` has, in its form."""
    return {
        name: {"was": [*shape], "shape": [*shape], "value": value}
        for name, (shape, value) in snapshot.initial.items()
        if value is not None
    }
