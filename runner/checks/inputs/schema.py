"""What batches look like: as the config has it, or as the first batches had it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.checks.config import SchemaConfig
from runner.checks.inputs.baseline import Baseline
from runner.record.plain import finite
from runner.storage import replace_text

FILE = "debug/schema.json"
ANY = -1  # a length that varies

Form = tuple[str, tuple[int, ...]]
"""Type, and shape of one sample."""


class Schema:
    """Type and shape of each tensor; lengths that vary among the first batches may vary on.

    So may the length of texts, which are padded to the longest of a batch, even where the first
    batches all had the same; with it goes each length of other tensors that was the same.
    """

    def __init__(self, config: SchemaConfig) -> None:
        self.config = config
        self.forms: dict[str, Form] = {}
        self.settled = False  # no more is learned

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
        was, now = self._lengths(found, text, longest)
        for name, tensor in found.items():
            dtype, shape = form_of(tensor)
            known = self._known(name, (dtype, shape), name == main)
            if known is None:
                if self.forms:
                    return f"{name} is new: {dtype} of shape {list(shape)} a sample"
                continue
            asked = name == main and self.config.shape is not None
            fits = len(known[1]) == len(shape) and all(
                a in (ANY, b) or (not asked and (a, b) == (was, now))
                for a, b in zip(known[1], shape, strict=True)
            )
            if dtype != known[0] or not fits:
                wanted = [n if n != ANY else "any" for n in known[1]]
                return (
                    f"{name} is {dtype} of shape {list(shape)} a sample, "
                    f"and should be {known[0]} of {wanted}"
                )
        missing = [name for name in self.forms if name not in found]
        return f"there is no {missing[0]} (or nothing in it)" if missing else None

    def _lengths(
        self, found: dict[str, Tensor], text: str | None, longest: int | None
    ) -> tuple[int | None, int]:
        """How long texts were, None where they must be as they were, and how long they are now."""
        if text is None or text not in self.forms or len(self.forms[text][1]) != 1:
            return None, 0
        was, now = self.forms[text][1][0], found[text].shape[1]
        bounded = longest is not None and self.config.shape is None
        return None if bounded and now > max(longest or 0, was) else was, now

    def learn(self, found: dict[str, Tensor]) -> None:
        """Take a sound batch in."""
        if self.settled:
            return
        for name, tensor in found.items():
            dtype, shape = form_of(tensor)
            if name in self.forms and len(self.forms[name][1]) == len(shape):
                pairs = zip(self.forms[name][1], shape, strict=True)
                shape = tuple(a if a == b else ANY for a, b in pairs)
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
        self.settled = state["settled"]

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
        replace_text(path, json.dumps(finite(content), indent=2) + "\n")


def form_of(tensor: Tensor) -> Form:
    """Type, and shape of one sample."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])


def _typed(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)
