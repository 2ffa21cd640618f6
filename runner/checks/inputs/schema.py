"""What batches look like: as the config has it, or as the first batches had it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checks.config import SchemaConfig
from runner.checks.inputs.baseline import Baseline
from runner.checks.inputs.measure import is_index
from runner.record.text import json_safe
from runner.storage import replace_text

FILE = "debug/schema.json"
ANY = -1  # a length that varies
COLOURS = 4  # so many channels, or fewer, are those of an image

Form = tuple[str, tuple[int, ...]]
"""Type, and shape of one sample."""


class Schema:
    """Type and shape of each tensor; type, dimensions and the number of features stay as they were.

    Lengths that vary among the first batches may vary on, and so may those of texts and of other
    sequences and images that came in one length until now: they are padded to the longest of a
    batch, or grouped by it. Where samples have several dimensions, the first or the last of these
    holds features or channels and stays; a length that varies elsewhere may then vary here, too.
    """

    def __init__(self, config: SchemaConfig) -> None:
        self.config = config
        self.forms: dict[str, Form] = {}
        self.settled = False  # no more is learned than lengths
        self.sizes: dict[str, torch.Size] = {}  # of the batch before

    def differs(
        self,
        found: dict[str, Tensor],
        main: str | None,
        text: str | None = None,
        longest: int | None = None,
    ) -> str | None:
        """What is another than it should be, in words; None: nothing is.

        `text` names a tensor of token ids [samples, length], of up to `longest` tokens where that
        is known.
        """
        moved: set[tuple[int, int]] | None = None  # lengths as they were, and are
        for name, tensor in found.items():
            dtype, shape = form_of(tensor)
            known = self._known(name, (dtype, shape), name == main)
            if known is None:
                if self.forms:
                    return f"{name} is new: {dtype} of shape {list(shape)} a sample"
                continue
            fits = _fits(known[1], shape)
            if not fits and not (name == main and self.config.shape is not None):
                moved = self._moved(found, text, longest) if moved is None else moved
                fits = self._follows(name, shape, tensor, moved, text)
            if dtype != known[0] or not fits:
                wanted = [n if n != ANY else "any" for n in known[1]]
                return (
                    f"{name} is {dtype} of shape {list(shape)} a sample, "
                    f"and should be {known[0]} of {wanted}"
                )
        missing = [name for name in self.forms if name not in found]
        return f"there is no {missing[0]} (or nothing in it)" if missing else None

    def _moved(
        self, found: dict[str, Tensor], text: str | None, longest: int | None
    ) -> set[tuple[int, int]]:
        """Each length that is usual and another than before, as it was and as it is."""
        moved: set[tuple[int, int]] = set()
        for name, tensor in found.items():
            was, now = self.forms.get(name, ("", ()))[1], tuple(tensor.shape[1:])
            if name == text and len(was) == 1:
                bounded = longest is not None and self.config.shape is None
                if not (bounded and now[0] > max(longest or 0, *was)):
                    moved.add((was[0], now[0]))
            elif _other_lengths(was, now):
                moved.update((a, b) for a, b in zip(was, now, strict=True) if a not in (ANY, b))
        return moved

    def _follows(
        self,
        name: str,
        shape: tuple[int, ...],
        tensor: Tensor,
        moved: set[tuple[int, int]],
        text: str | None,
    ) -> bool:
        """Whether only such lengths of that tensor differ as vary in these data."""
        was = self.forms[name][1] if name in self.forms else ()
        if len(was) != len(shape):
            return False
        if _other_lengths(was, shape) or all(
            a in (ANY, b) or (a, b) in moved for a, b in zip(was, shape, strict=True)
        ):
            return True
        vary = moved or any(len(s) > 1 and ANY in s for _, s in self.forms.values())
        whole = is_index(tensor.dtype) or tensor.dtype is torch.bool  # labels of each step, a mask
        return bool(vary) and len(shape) == 1 and name != text and whole

    def widen(self, found: dict[str, Tensor], text: str | None) -> list[str]:
        """Take the lengths of a batch that did not differ in; in words, each that is new.

        Those of texts are asked for each time, since they have a bound of their own.
        """
        sizes = {name: tensor.shape for name, tensor in found.items()}
        if sizes == self.sizes:
            return []
        self.sizes, said = sizes, []
        for name, tensor in found.items():
            (dtype, shape), (_, was) = form_of(tensor), self.forms.get(name, ("", ()))
            if name != text and len(was) == len(shape) and not _fits(was, shape):
                self.forms[name] = (dtype, _joined(was, shape))
                usual = [n if n != ANY else "any" for n in was]
                said.append(f"{name} is of {list(shape)} a sample, and was of {usual}")
        return said

    def learn(self, found: dict[str, Tensor]) -> None:
        """Take a sound batch in."""
        if self.settled:
            return
        for name, tensor in found.items():
            dtype, shape = form_of(tensor)
            if name in self.forms and len(self.forms[name][1]) == len(shape):
                shape = _joined(self.forms[name][1], shape)
            self.forms[name] = (dtype, shape)

    def _known(self, name: str, own: Form, main: bool) -> Form | None:
        """As the config or the first batches have it; what nobody states, as it is."""
        learned = self.forms.get(name)
        if learned is not None and not self.settled:
            learned = (learned[0], (ANY,) * len(learned[1]))
        asked = self.config
        if not main or (asked.shape is None and asked.dtype is None):
            return learned
        dtype, shape = learned or own
        return asked.dtype or dtype, shape if asked.shape is None else tuple(asked.shape)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        forms = {name: [dtype, list(shape)] for name, (dtype, shape) in self.forms.items()}
        return {"forms": forms, "settled": self.settled}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.forms = {n: (dtype, tuple(shape)) for n, (dtype, shape) in state["forms"].items()}
        self.settled, self.sizes = state["settled"], {}

    def write(
        self, folder: Path, baseline: Baseline, main: str | None, classes: int | None
    ) -> None:
        """As debug/schema.json, with the overrides that give it to another run. Raises OSError."""
        rows = {
            name: {
                "dtype": dtype,
                "shape": list(shape),
                "low": baseline.ranges.get(name, (None, None))[0],
                "high": baseline.ranges.get(name, (None, None))[1],
            }
            for name, (dtype, shape) in self.forms.items()
        }
        own = rows.get(main or "", {})
        if classes:
            own = {**own, "classes": classes}
        overrides = [
            f"checks.inputs.schema.{key}={_typed(value)}"
            for key, value in own.items()
            if value is not None
        ]
        path = folder / FILE
        path.parent.mkdir(exist_ok=True)
        content = {"tensors": rows, "batches": len(baseline.rows), "overrides": overrides}
        replace_text(path, json.dumps(json_safe(content), indent=2) + "\n")


def form_of(tensor: Tensor) -> Form:
    """Type, and shape of one sample."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])


def _fits(known: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    same = len(known) == len(shape)
    return same and all(a in (ANY, b) for a, b in zip(known, shape, strict=True))


def _joined(known: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a if a == b else ANY for a, b in zip(known, shape, strict=True))


def _other_lengths(known: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether shapes of a sample have their features or channels in common, at either end."""
    if len(known) != len(shape) or len(known) < 2:
        return False
    ends = [0, -1]
    if len(known) > 2:  # of images, which of them it is can be told
        ends = [end for end in ends if 0 < known[end] <= COLOURS][:1] or ends
    return any(known[end] == shape[end] for end in ends)


def _typed(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)
