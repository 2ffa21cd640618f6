"""A model with its preprocessing as one program: raw numbers and categories in, answers out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.data.batch import Column, call
from runner.data.cells import GAP
from runner.data.preprocessing import Preprocessing
from runner.objectives.model_output import logits


class RawInputModel(nn.Module):
    """Probabilities of the classes, or values in the target's unit, from raw inputs.

    Of tables: numbers before scaling, float32 [batch, columns], NaN where one is missing, and
    places of categories, int64 [batch, columns]: any other for an unknown one. Of images: uint8
    [batch, channels, height, width].
    """

    means: Tensor
    deviations: Tensor
    fills: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model, self.sizes = model, preprocessing.sizes
        self.columns = preprocessing.columns
        numbers = [column for column in self.columns if is_number(column)]
        fills = [c.mean if c.fill is None else c.fill for c in numbers]
        for name, values in (
            ("means", [c.mean for c in numbers]),
            ("deviations", [c.deviation for c in numbers]),
            ("fills", fills),
        ):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def forward(self, raw: Tensor, categories: Tensor | None = None) -> Tensor:
        """The answers, float32 [batch, classes] or [batch, values]."""
        inputs = raw.float() / 255 if categories is None else self._inputs(raw, categories)
        output = logits(call(self.model, inputs)).double()
        if self.sizes.task == "classification":
            return output.softmax(1).float()
        values = output * self.sizes.target_deviation + self.sizes.target_mean
        # len() would fix the batch size
        return values.reshape(values.shape[0], -1).float()

    def _inputs(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """What `encode` makes of a table's columns."""
        missing = numbers.isnan()
        scaled = torch.where(missing, self.fills, numbers.double())
        scaled = (scaled - self.means) / self.deviations
        parts, number, category = [], 0, 0
        places: dict[str, int] = {}
        for column in self.columns:
            if column.values:
                known = torch.arange(len(column.values))
                one_hot = categories[:, category : category + 1] == known
                parts += [one_hot, ~one_hot.any(1, keepdim=True)]
                category += 1
            elif column.part == GAP:
                place = places[column.name]
                parts.append(missing[:, place : place + 1])
            else:
                places[column.name] = number
                parts.append(scaled[:, number : number + 1])
                number += 1
        return torch.cat([part.float() for part in parts], 1)


def is_number(column: Column) -> bool:
    """Whether it is one of the pipeline's numbers."""
    return not column.values and column.part != GAP


def has_pipeline(preprocessing: Preprocessing) -> bool:
    """Whether raw inputs are standardised: those of tables and images."""
    return bool(preprocessing.columns) or preprocessing.kind == "images"


def raw_inputs(preprocessing: Preprocessing, inputs: Tensor) -> tuple[Tensor, ...]:
    """Raw inputs that the pipeline makes about these of."""
    if not preprocessing.columns:
        return ((inputs * 255).round().to(torch.uint8),)
    numbers, categories, at = [], [], 0
    for column in preprocessing.columns:
        cells = inputs[:, at : at + column.width]
        if column.values:
            categories.append(cells.argmax(1))
        elif is_number(column):
            numbers.append((cells[:, 0].double() * column.deviation + column.mean).float())
        at += column.width
    count = len(inputs)
    return (
        torch.stack(numbers, 1) if numbers else torch.zeros(count, 0),
        torch.stack(categories, 1) if categories else torch.zeros(count, 0, dtype=torch.int64),
    )
