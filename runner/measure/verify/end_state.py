"""The recorded results of a run, in order of computation: metrics and checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.core.checkpoint.folder import FOLDER, is_checkpoint, steps
from runner.core.checkpoint.reading import load_checkpoint
from runner.core.record.storage import read_record
from runner.measure.verify.processes import FACTS_FILE

COMPARED_SPLITS = ("train", "val", "test")
"""Splits of metrics.jsonl to compare; others describe the machine."""
IGNORED_STATE = set(
    "record user events choices settings config_hash seed steps_per_epoch threads".split()
)
"""Parts of a checkpoint's state that do not affect results after the run is built."""
STATE_KINDS = {
    **dict.fromkeys(("planned", "clean", "progress", "reader"), "progress"),
    "stability": "guard",
    "inputs": "guard",
    "history": "fault",
    "random": "random",
}
UPDATE_KINDS = {"average": "average", "scale": "loss_scale"}


class ValueKey(NamedTuple):
    """Identifies one value of a run at a step."""

    step: int
    kind: str  # metric | parameter | buffer | optimizer | average | loss_scale | guard | random | …
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} at step {self.step}"

    @property
    def is_option(self) -> bool:
        """Whether it is an optimizer's option, which the config or the techniques choose."""
        options = "optimizer.param_groups.", "options."
        return self.kind == "optimizer" and self.name.startswith(options)


Values = dict[ValueKey, Any]


@dataclass(frozen=True)
class EndState:
    """All recorded values of a run, and facts about its model."""

    values: Values
    facts: Mapping[str, Any]

    def count(self) -> dict[str, int]:
        """Return the number of values by kind."""
        return dict(Counter(key.kind for key in self.values))


def read_end_state(folder: Path, checkpoint_steps: Iterable[int] | None = None) -> EndState:
    """Read the results of the run in `folder`, with the checkpoints of these steps (None: all).

    Raises CheckpointError if one is damaged.
    """
    facts = {}
    if (folder / FACTS_FILE).is_file():
        facts = json.loads(read_record(folder / FACTS_FILE))
    values = read_metrics(folder)
    parameters = set(facts.get("parameters", ()))
    for step, path in saved_steps(folder).items():
        if checkpoint_steps is None or step in checkpoint_steps:
            restored = load_checkpoint(path)
            values |= dict(_checkpoint_values(step, restored.model, restored.state, parameters))
    return EndState({key: values[key] for key in sorted(values, key=_sort_key)}, facts)


def _sort_key(key: ValueKey) -> tuple[int, int]:
    """Sort key: by step, training metrics, then checkpoint, then validation."""
    after = 0 if key.name.startswith("train/") else 2
    return key.step, after if key.kind == "metric" else 1


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step."""
    saved = steps(folder / FOLDER)
    return {step: saved[step] for step in sorted(saved) if is_checkpoint(saved[step])}


def read_metrics(folder: Path) -> Values:
    """Read the metrics of a run."""
    values: Values = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        step, split = row.pop("step"), row.pop("split")
        if split in COMPARED_SPLITS:
            values |= {ValueKey(step, "metric", f"{split}/{key}"): row[key] for key in row}
    return values


def _checkpoint_values(
    step: int, model: Mapping[str, Any], state: Mapping[str, Any], parameters: set[str]
) -> Iterator[tuple[ValueKey, Any]]:
    """Yield the values of a checkpoint, in the order in which they are restored."""
    for name, value in model.items():
        kind = "parameter" if name in parameters or not parameters else "buffer"
        yield ValueKey(step, kind, name), value
    for part, content in state["update"].items():
        for path, value in _leaves(content, part) if part != "names" else ():
            yield ValueKey(step, UPDATE_KINDS.get(part, "optimizer"), path), value
    for part, content in state.items():
        if part == "update" or part in IGNORED_STATE:
            continue
        for path, value in _leaves(content, part, 1 if part == "random" else 9):
            yield ValueKey(step, STATE_KINDS.get(part, part), path), value


def _leaves(value: Any, path: str, depth: int = 9) -> Iterator[tuple[str, Any]]:
    """Yield values of nested containers with their paths; containers below `depth` as one."""
    if not depth or not isinstance(value, Mapping | list | tuple):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(item, f"{path}.{key}", depth - 1)


def differing_keys(values: Values, others: Values) -> list[ValueKey]:
    """Return the keys of values that are not bit-equal, in order of computation."""
    keys = sorted(dict.fromkeys([*values, *others]), key=_sort_key)
    return [key for key in keys if not is_bit_equal(values.get(key), others.get(key))]


def is_bit_equal(a: Any, b: Any) -> bool:
    """Whether both are bit-equal: NaN equals itself, and -0 differs from 0."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)
