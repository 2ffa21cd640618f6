"""What the state of a run in a checkpoint looks like, checked before any of it is put into a run.

A manifest that was made by hand fits its files, whatever is in them. What else the parts of a run
hold against each other (lengths that belong together) they find when they load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from runner.errors import CheckpointError

MOST_STEPS = 10**12  # at a microsecond each, eleven days
WAY_OUT = "name another checkpoint with checkpoint.resume, or start afresh"


@dataclass(frozen=True)
class Whole:
    """A whole number."""

    least: int = 0
    most: int = 2**62

    def odd(self, value: Any, where: str) -> str:
        """What is wrong with the value at that place; nothing where it is as it should be."""
        good = type(value) is int and self.least <= value <= self.most
        most = f" to {self.most}" if self.most < 2**62 else " or more"
        return "" if good else _is(value, where, f"a whole number, {self.least}{most}")


@dataclass(frozen=True)
class Number:
    """A number that a float holds; any, NaN and Inf too, or one within these ends."""

    ends: tuple[float, float] | None = None

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        good = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if self.ends is None:
            return "" if good else _is(value, where, "a number")
        low, high = self.ends
        wanted = f"a number, {low:g} to {high:g}"
        return "" if good and low <= value <= high else _is(value, where, wanted)


@dataclass(frozen=True)
class Kind:
    """Anything of a plain type."""

    type: type
    word: str

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        return "" if type(value) is self.type else _is(value, where, self.word)


@dataclass(frozen=True)
class Tensor:
    """A dense tensor on the CPU; None among its sizes is any, and so is no `dtype`."""

    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return _is(value, where, "a tensor")
        fits = self.shape is None or (
            len(self.shape) == value.ndim
            and all(n is None or n == m for n, m in zip(self.shape, value.shape, strict=True))
        )
        if fits and self.dtype in (None, value.dtype):
            return ""
        sizes = "any shape" if self.shape is None else f"shape {list(self.shape)}"
        return (
            f"{where} is {value.dtype} of shape {list(value.shape)}, and should be "
            f"{self.dtype or 'numbers'} of {sizes}"
        )


@dataclass(frozen=True)
class Maybe:
    """None, or that."""

    form: Form

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        return "" if value is None else self.form.odd(value, where)


@dataclass(frozen=True)
class Many:
    """A list of those, of any length; with `alike`, lists of one length."""

    form: Form
    alike: bool = False

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        if type(value) not in (list, tuple):
            return _is(value, where, "a list")
        for i, item in enumerate(value):
            if found := self.form.odd(item, f"{where}[{i}]"):
                return found
        if self.alike and len({len(item) for item in value}) > 1:
            return f"{where} has rows of different lengths"
        return ""


@dataclass(frozen=True)
class Row:
    """A list of these, one after the other."""

    forms: tuple[Form, ...]

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        if type(value) not in (list, tuple) or len(value) != len(self.forms):
            return _is(value, where, f"a list of {len(self.forms)}")
        pairs = enumerate(zip(self.forms, value, strict=True))
        return next((x for i, (f, v) in pairs if (x := f.odd(v, f"{where}[{i}]"))), "")


@dataclass(frozen=True)
class Named:
    """Those by names, whichever these are."""

    form: Form

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        if type(value) is not dict:
            return _is(value, where, "a dict")
        for name, item in value.items():
            if type(name) is not str:
                return f"{where} has the key {_quoted(name)}, which is no text"
            if found := self.form.odd(item, f"{where}.{name[:40]}"):
                return found
        return ""


@dataclass(frozen=True)
class Fields:
    """These by their names; the `later` ones may be missing, and `more` may be there."""

    forms: Mapping[str, Form]
    later: Mapping[str, Form] = field(default_factory=dict)
    more: bool = False

    def odd(self, value: Any, where: str) -> str:
        """As `Whole.odd`."""
        if type(value) is not dict:
            return _is(value, where, "a dict")
        if missing := [name for name in self.forms if name not in value]:
            return f"{where} has no {missing[0]!r}"
        known = {**self.forms, **self.later}
        for name, item in value.items():
            if name not in known and not self.more:
                return f"{where} has an unknown {_quoted(name)}"
            if name in known and (found := known[name].odd(item, f"{where}.{name}")):
                return found
        return ""


Form = Whole | Number | Kind | Tensor | Maybe | Many | Row | Named | Fields

WHOLE, STEP, NUMBER = Whole(), Whole(most=MOST_STEPS), Number()
FACTOR = Number((1e-300, 1.0))  # of a learning rate: the product of many that lower it
TEXT, FLAG = Kind(str, "text"), Kind(bool, "true or false")

PROGRESS = Fields(
    {"step": STEP},
    {
        **dict.fromkeys(("skipped", "consecutive_skips", "rollbacks", "best_step"), STEP),
        **dict.fromkeys(("stale_validations", "validated_step"), STEP),
        "best": Maybe(NUMBER), "metrics": Named(NUMBER),
    },
)  # fmt: skip
FAULT = Fields(
    dict.fromkeys(("kind", "category", "severity", "message", "action"), TEXT),
    {"steps": Many(STEP), "last_step": STEP, "count": WHOLE, "traceback": TEXT, "capture": TEXT},
)
DECISION = Fields(
    {"row": Maybe(Whole(-1)), "kind": TEXT, "step": STEP, "message": TEXT},
    {
        "capture": TEXT, "raises": FLAG, "in_a_row": WHOLE, "stuck": FLAG, "since": STEP,
        "outdated": FLAG,
    },
)  # fmt: skip
ANOMALY = Fields(
    {
        "step": STEP, "kind": TEXT, "skipped": FLAG,
        **dict.fromkeys(("loss", "grad_norm", "loss_limit", "grad_norm_limit"), NUMBER),
    },
    {"action": TEXT, "capture": TEXT},
)  # fmt: skip
LIMITS = Fields({"after": STEP}, {"loss": NUMBER, "grad_norm": NUMBER})
USUAL = Fields({
    "values": Many(NUMBER), "first": Maybe(NUMBER), "centre": NUMBER, "spread": NUMBER,
    "moving": FLAG,
})  # fmt: skip
STABILITY = Fields(
    {
        "spikes": Fields({"usual": Named(USUAL), "limits": Many(LIMITS)}),
        "table": Fields({
            "used": Many(WHOLE), "steps": Named(Many(STEP)), "counts": Named(WHOLE),
        }),
        "anomalies": Fields({"count": WHOLE, "rows": Many(ANOMALY)}),
        "decision": Maybe(DECISION), "settled": STEP, "forgotten": STEP, "share": FACTOR,
        "lowered": Many(Row((STEP, FACTOR))), "ruined": FLAG, "vetoed": Many(STEP),
    },
    {"streak": STEP},
)  # fmt: skip
INPUTS = Fields({"in_a_row": WHOLE}, more=True)  # older versions kept more
UPDATE = Fields({
    "optimizer": Fields(
        {"state": Kind(dict, "a dict"), "param_groups": Many(Kind(dict, "a dict"))}, more=True
    ),
    "updates": Tensor(torch.int64, ()), "backoff": FACTOR, "average": Many(Tensor()),
    "scale": Many(Tensor()),
})  # fmt: skip
RANDOM = Fields({
    "torch": Tensor(torch.uint8, (None,)),
    "python": Row((WHOLE, Many(WHOLE), Maybe(NUMBER))),
    "numpy": Row((TEXT, Tensor(torch.uint32, (624,)), Whole(most=624), Whole(most=1), NUMBER)),
})  # fmt: skip
STATE = Fields(
    {
        "progress": PROGRESS, "update": UPDATE, "random": RANDOM, "stability": STABILITY,
        "reader": Fields({
            "first": STEP, "rows": Many(Row((NUMBER, NUMBER, NUMBER))), "samples": WHOLE,
        }),
        "history": Fields({"counts": Named(WHOLE), "faults": Many(FAULT)}),
        "record": WHOLE, "config_hash": TEXT, "settings": Named(TEXT), "threads": WHOLE,
        "steps_per_epoch": WHOLE, "planned": FLAG,
    },
    {"inputs": Maybe(INPUTS), "clean": FLAG},
    more=True,
)  # fmt: skip


def check_state(state: Any, step: int, where: str) -> None:
    """Refuse what is no state of a run after that step: CheckpointError, naming what is odd."""
    odd = STATE.odd(state, "state")
    if not odd:
        progress, updates = state["progress"], int(state["update"]["updates"])
        behind = ("best_step", "validated_step", "skipped", "consecutive_skips")
        if progress["step"] != step:
            odd = f"state.progress.step is {progress['step']}, and the manifest says {step}"
        elif late := [name for name in behind if progress.get(name, 0) > step]:
            odd = f"state.progress.{late[0]} is {progress[late[0]]}, beyond the step {step}"
        elif not 0 <= updates <= step:
            odd = f"state.update.updates is {updates}, and should be 0 to {step}, the step"
    if odd:
        raise refused(where, odd)


def refused(where: str, odd: str) -> CheckpointError:
    """The error for a checkpoint whose files are whole, and whose content is not ours."""
    return CheckpointError(f"{where}: not what a run of the runner keeps: {odd}; {WAY_OUT}")


def _is(value: Any, where: str, wanted: str) -> str:
    return f"{where} is {_quoted(value)}, and should be {wanted}"


def _quoted(value: Any) -> str:
    """Short, whatever it is: a number of a million digits takes minutes to write."""
    if type(value) is str:
        return repr(value[:40])
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int and abs(value) < 2**127:
        return str(value)
    return f"a {type(value).__name__}"
