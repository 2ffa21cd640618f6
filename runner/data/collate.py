"""From the samples of a user's data set to a batch, refusing what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.nested import named_leaves, tree_map
from runner.errors import BadSample, DataError

Nest = Any
"""A tensor, or a tuple or dict of nests."""

LABEL_KEYS = ("labels", "label", "target", "targets", "y")


def as_pair(sample: Any, index: int, place: int = 0) -> tuple[Nest, Nest]:
    """Inputs and target of one sample, as tensors.

    A sample is (inputs, target), (input, input, …, target), or a dict whose target is under one
    of `LABEL_KEYS`. Raises BadSample, which has its place in the batch, for anything else.
    """
    key = next((k for k in LABEL_KEYS if k in sample), None) if isinstance(sample, dict) else None
    if key is not None:
        inputs: Any = {k: v for k, v in sample.items() if k != key}
        at = index, place
        return _tensors(inputs, "inputs", *at), _tensors(sample[key], str(key), *at)
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        fix = f"return (inputs, target), or a dict with one of {', '.join(LABEL_KEYS)}"
        raise BadSample(place, f"data: sample {index} is {_describe(sample)}", f"; {fix}")
    inputs = sample[0] if len(sample) == 2 else tuple(sample[:-1])
    return _tensors(inputs, "inputs", index, place), _tensors(sample[-1], "target", index, place)


def stack_pairs(samples: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Inputs and classes of samples that are (tensor, int) and alike; None for any others.

    `as_pair` and `stack` give the same, in three times the time.
    """
    if not all(type(s) is tuple and len(s) == 2 and type(s[0]) is Tensor for s in samples):
        return None
    inputs, classes = zip(*samples, strict=True)
    first = inputs[0]
    if not all(isinstance(c, int | np.integer) and not isinstance(c, bool) for c in classes):
        return None
    if not all(x.shape == first.shape and x.dtype is first.dtype for x in inputs):
        return None
    return torch.stack(inputs).detach(), torch.tensor([int(c) for c in classes])


def stack(samples: Sequence[Nest], indices: Sequence[int], key: str) -> Nest:
    """One nest of tensors with the sample as the first dimension.

    Raises DataError where a sample differs from the first one in shape, dtype or keys: torch's own
    collation in workers would cast it silently.
    """
    leaves = [list(named_leaves(sample, key)) for sample in samples]
    forms = [[(name, leaf.shape, leaf.dtype) for name, leaf in row] for row in leaves]
    odd = next((i for i, form in enumerate(forms) if form != forms[0]), None)
    if odd is not None:
        this, first = (
            ", ".join(f"{name} is {_describe(leaf)}" for name, leaf in leaves[i]) for i in (odd, 0)
        )
        other = f"in sample {indices[0]} of the same batch {first}"
        raise DataError(f"data: sample {indices[odd]}: {this}, and {other}; all must be alike")
    columns = (torch.stack([leaf for _, leaf in column]) for column in zip(*leaves, strict=True))
    return tree_map(samples[0], lambda _: next(columns))


def main_leaf(inputs: Nest) -> Tensor:
    """The tensor that the sizes are read from: `input_ids` where there is one, else the first."""
    leaves = dict(named_leaves(inputs))
    return leaves.get("input_ids", next(iter(leaves.values())))


def _tensors(value: Any, key: str, index: int, place: int) -> Nest:
    if isinstance(value, dict):
        return {k: _tensors(v, f"{key}.{k}", index, place) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_tensors(v, f"{key}[{i}]", index, place) for i, v in enumerate(value))
    if isinstance(value, bool | int | np.integer | np.bool_):
        return torch.tensor(int(value))
    if isinstance(value, float | np.floating):
        return torch.tensor(float(value), dtype=torch.float32)
    try:
        tensor = torch.as_tensor(value) if isinstance(value, list | np.ndarray) else value
    except (TypeError, ValueError):
        tensor = value
    if not isinstance(tensor, Tensor):
        fix = "return a tensor from __getitem__, float32 where it holds floats, such as x.float()"
        problem = f"data: sample {index}: {key} is {_describe(tensor)}"
        raise BadSample(place, problem, f"; {fix}")
    return tensor.detach()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    keys = f"dict of {', '.join(map(str, value))}" if isinstance(value, dict) else ""
    return f"a {keys or type(value).__name__}"
