"""What people hand over as a batch, an example or data, in the form that a run takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Batch, Inputs, Sizes
from runner.data.collate import LABEL_KEYS
from runner.data.dataset import Dataset
from runner.data.nested import tensors, tree_map
from runner.errors import UsageError
from runner.techniques.base import Choice


def as_batch(batch: Any, who: str) -> Batch:
    """Inputs and target of a batch: (inputs, target), (input, …, target), or a dict with labels."""
    if isinstance(batch, dict):
        key = next((k for k in LABEL_KEYS if k in batch), None)
        if key is not None:
            return {k: v for k, v in batch.items() if k != key}, batch[key]
    elif isinstance(batch, tuple | list) and len(batch) >= 2:
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    raise UsageError(
        f"{who}: batch must be (inputs, target), or a dict with the target under one of "
        f"{', '.join(LABEL_KEYS)}, got {describe(batch)}"
    )


def moved(value: Any, device: torch.device) -> Any:
    """The nest on the device, without waiting for tensors in pinned memory."""
    return tree_map(value, lambda t: t.to(device, non_blocking=t.device.type == "cpu"))


def samples(inputs: Inputs, who: str) -> int:
    """How many samples there are: the first dimension of the first tensor."""
    found = tensors(inputs)
    if not found or not found[0].ndim or not len(found[0]):
        raise UsageError(
            f"{who} must be tensors whose first dimension is the sample, got {describe(inputs)}"
        )
    return len(found[0])


def describe(value: Any) -> str:
    """Type and shape of a value, for a message."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe(v) for v in value) + ")"
    return f"a {type(value).__name__}"


class InMemory(Dataset):
    """Inputs and target as nests of tensors, the sample first."""

    def __init__(
        self,
        inputs: Inputs,
        target: Any,
        sizes: Sizes,
        parts: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
    ) -> None:
        self.inputs, self.target, self.sizes, self.choices = inputs, target, sizes, choices
        self.train, self.validation = parts
        self.n = 1 + max(int(part.max()) for part in parts)

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Copies of the rows; a tensor without a row for each sample is for all of them."""
        rows = torch.from_numpy(indices)

        def cut(tensor: Tensor) -> Tensor:
            return tensor[rows] if tensor.ndim and len(tensor) == self.n else tensor

        return tree_map(self.inputs, cut), tree_map(self.target, cut)
