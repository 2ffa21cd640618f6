"""From the samples of a user's data set to a batch, refusing what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.errors import DataError

Nest = Any
"""A tensor, or a tuple or dict of nests."""

LABEL_KEYS = ("labels", "label", "target", "targets", "y")


def as_pair(sample: Any, index: int) -> tuple[Nest, Nest]:
    """Inputs and target of one sample, as tensors.

    A sample is (inputs, target), (input, input, …, target), or a dict whose target is under one
    of `LABEL_KEYS`.
    """
    if isinstance(sample, dict):
        key = next((k for k in LABEL_KEYS if k in sample), None)
        if key is None:
            raise DataError(
                f"data: sample {index} is a dict with the keys {', '.join(map(str, sample))}; its "
                f"target must be under one of {', '.join(LABEL_KEYS)}"
            )
        inputs: Any = {k: v for k, v in sample.items() if k != key}
        return _tensors(inputs, "inputs", index), _tensors(sample[key], str(key), index)
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise DataError(
            f"data: sample {index} is {_describe(sample)}; return (inputs, target), or a dict "
            f"with the target under one of {', '.join(LABEL_KEYS)}"
        )
    inputs = sample[0] if len(sample) == 2 else tuple(sample[:-1])
    return _tensors(inputs, "inputs", index), _tensors(sample[-1], "target", index)


def stack(samples: Sequence[Nest], indices: Sequence[int], key: str) -> Nest:
    """One nest of tensors with the sample as the first dimension.

    Raises DataError where a sample differs from the first one in shape, dtype or keys: torch's own
    collation in workers would cast it without a word.
    """
    first = samples[0]
    for sample, index in zip(samples, indices, strict=True):
        if _form(sample) != _form(first):
            raise DataError(
                f"data: sample {index}: {key} is {_describe(sample)}, and in sample {indices[0]} "
                f"of the same batch it is {_describe(first)}; all must have one shape and dtype"
            )
    if isinstance(first, dict):
        return {k: stack([s[k] for s in samples], indices, f"{key}.{k}") for k in first}
    if isinstance(first, tuple):
        columns = enumerate(zip(*samples, strict=True))
        return tuple(stack(column, indices, f"{key}[{i}]") for i, column in columns)
    return torch.stack(list(samples))


def leaves(nest: Nest, key: str) -> list[tuple[str, Tensor]]:
    """Every tensor in a nest, with its name."""
    if isinstance(nest, dict):
        return [leaf for k, v in nest.items() for leaf in leaves(v, f"{key}.{k}")]
    if isinstance(nest, tuple):
        return [leaf for i, v in enumerate(nest) for leaf in leaves(v, f"{key}[{i}]")]
    return [(key, nest)]


def main_leaf(inputs: Nest) -> Tensor:
    """The tensor that the sizes are read from: `input_ids` where there is one, else the first."""
    found = dict(leaves(inputs, "inputs"))
    return found.get("inputs.input_ids", next(iter(found.values())))


def _tensors(value: Any, key: str, index: int) -> Nest:
    if isinstance(value, dict):
        return {k: _tensors(v, f"{key}.{k}", index) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_tensors(v, f"{key}[{i}]", index) for i, v in enumerate(value))
    if isinstance(value, bool | int | np.integer | np.bool_):
        return torch.tensor(int(value))
    if isinstance(value, float | np.floating):
        return torch.tensor(float(value), dtype=torch.float32)
    tensor = value
    if isinstance(value, list | np.ndarray):
        try:
            tensor = torch.tensor(value) if isinstance(value, list) else torch.from_numpy(value)
        except (TypeError, ValueError):
            pass
    if not isinstance(tensor, Tensor):
        raise DataError(
            f"data: sample {index}: {key} is {_describe(value)}, which is no tensor; convert it in "
            "__getitem__"
        )
    if tensor.dtype == torch.float64:
        raise DataError(
            f"data: sample {index}: {key} is float64, and models compute in float32; return "
            "x.float() or x.astype(np.float32) from __getitem__"
        )
    return tensor.detach()


def _form(nest: Nest) -> object:
    """What has to be the same in all samples of a batch, one level deep."""
    if isinstance(nest, dict):
        return tuple(nest)
    if isinstance(nest, tuple):
        return len(nest)
    return nest.shape, nest.dtype


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a numpy array of {value.dtype}"
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
