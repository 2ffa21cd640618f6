"""A model with its preprocessing as one module: raw inputs in, predictions out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runner.core.data.preprocessing import Preprocessing
from runner.core.interfaces.batch import Column, call_model
from runner.core.objectives.model_output import class_logits, logits
from runner.datasets.cells import MISSING_FLAG


class RawInputModel(nn.Module):
    """Returns class probabilities, or values in the target's unit, from raw inputs.

    Tables: unscaled numbers, float64 [batch, columns], NaN where missing, and category indices,
    int64 [batch, columns], any invalid index for an unknown category. Images: uint8 [batch,
    channels, height, width].
    """

    means: Tensor
    deviations: Tensor
    fills: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model, self.sizes = model, preprocessing.sizes
        self.columns, self.pixel_range = preprocessing.columns, preprocessing.pixel_range
        numbers = number_columns(self.columns)
        fills = [c.mean if c.fill is None else c.fill for c in numbers]
        for name, values in (
            ("means", [c.mean for c in numbers]),
            ("deviations", [c.deviation for c in numbers]),
            ("fills", fills),
        ):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, raw: Tensor, categories: Tensor | None = None) -> Tensor:
        """Return the predictions, float32 [batch, classes] or [batch, values]."""
        inputs = self._images(raw) if categories is None else self._inputs(raw, categories)
        output = logits(call_model(self.model, inputs)).double()
        if self.sizes.task == "classification":
            return class_logits(output, self.sizes.classes).softmax(1).float()
        values: Tensor = self.sizes.in_target_unit(output)
        # len() would make the batch size static
        return values.reshape(values.shape[0], -1).float()

    def _images(self, raw: Tensor) -> Tensor:
        """Scale the pixels by their own depth: uint8 by 255, others by the trained range."""
        if not self.pixel_range or raw.dtype is torch.uint8:
            return raw.float() / 255
        low, high = self.pixel_range
        return (raw.float() - low) / ((high - low) or 1.0)

    def _inputs(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Encode a table's columns as in training."""
        missing = numbers.isnan()
        scaled = torch.where(missing, self.fills, numbers.double())
        scaled = (scaled - self.means) / self.deviations
        numeric_columns = number_columns(self.columns)
        indices = {column.name: index for index, column in enumerate(numeric_columns)}
        parts, category = [], 0
        for column in self.columns:
            if column.values:
                known = torch.arange(len(column.values))
                one_hot = categories[:, category : category + 1] == known
                parts += [one_hot, ~one_hot.any(1, keepdim=True)]
                category += 1
            elif column.part == MISSING_FLAG:
                parts.append(missing[:, indices[column.name]].unsqueeze(1))
            else:
                parts.append(scaled[:, numeric_columns.index(column)].unsqueeze(1))
        return torch.cat([part.float() for part in parts], 1)


def number_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns for which the pipeline takes a number.

    A missing-value indicator is one only if its number is not an input itself.
    """
    names = {column.name for column in columns if column.part != MISSING_FLAG}
    return [c for c in columns if not c.values and (c.part != MISSING_FLAG or c.name not in names)]


def has_pipeline(preprocessing: Preprocessing) -> bool:
    """Whether raw inputs have a standard form: tables and images."""
    return bool(preprocessing.columns) or preprocessing.kind == "images"


def raw_inputs(preprocessing: Preprocessing, inputs: Tensor) -> tuple[Tensor, ...]:
    """Invert the preprocessing approximately; missing values become NaN."""
    columns = preprocessing.columns
    if preprocessing.pixel_range:
        low, high = preprocessing.pixel_range
        return (inputs * ((high - low) or 1.0) + low,)
    if not columns:
        return ((inputs * 255).round().to(torch.uint8),)
    cells = dict(
        zip(columns, torch.split(inputs.double(), [c.width for c in columns], 1), strict=True)
    )
    categories = [cells[column].argmax(1) for column in columns if column.values]
    missing_masks = {c.name: cells[c][:, 0] > 0 for c in columns if c.part == MISSING_FLAG}
    numbers = [
        (cells[column][:, 0] * column.deviation + column.mean).masked_fill(
            missing_masks.get(column.name, torch.tensor(False)), torch.nan
        )
        for column in number_columns(columns)
    ]
    count = len(inputs)
    return (
        torch.stack(numbers, 1) if numbers else torch.zeros(count, 0, dtype=torch.float64),
        torch.stack(categories, 1) if categories else torch.zeros(count, 0, dtype=torch.int64),
    )
