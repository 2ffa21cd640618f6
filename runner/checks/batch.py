"""Findings about one batch: its form, and one (low, high) reduction of each tensor.

The reduction runs on the batch's own device. Only `findings` needs its numbers on the host;
`veto` decides without reading them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.checks.config import CheckPolicy, InputsConfig
from runner.data.batch import Batch
from runner.data.nested import named_leaves, tree_map

log = logging.getLogger("runner")

Tensors = dict[str, Tensor]
"""The dense tensors of a batch by name: inputs, inputs.key, inputs[1], target."""

VETOES = (CheckPolicy.skip, CheckPolicy.stop)  # policies under which no update is made
FORM = "form"
LARGEST = torch.finfo(torch.float64).max
PRESCAN_VALUES = 1 << 24  # of data in memory that are scanned at once: 0.02 s
PRESCAN_PART = 1 << 22
REDUCIBLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)  # dtypes that `aminmax` takes on every device


@dataclass(frozen=True)
class DataSpec:
    """What is known of labels and tokens before the first batch."""

    classes: int | None = None  # labels are below it
    ignored: int | None = None  # a label that carries no loss
    vocab: int | None = None  # token ids are below it
    longest: int | None = None  # tokens of a sample


@dataclass(frozen=True)
class Limit:
    """The valid range of one tensor, and the check that holds it."""

    check: str
    leaf: str
    low: float = -math.inf
    high: float = math.inf

    def holds(self, low: Any, high: Any) -> Any:
        """Whether these least and largest values, floats or 0-d tensors, lie within."""
        if self.check == "constant":
            return low != high
        return (low >= self.low) & (high <= self.high)  # NaN fails


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a batch."""

    check: str
    message: str
    bad: Tensor | None = None  # one flag a sample; None: the batch as a whole


class BatchChecks:
    """Finds what is wrong with a batch; the first batch's form is what later ones are held to."""

    def __init__(self, config: InputsConfig, spec: DataSpec) -> None:
        self.config, self.spec = config, spec
        self.classes = config.schema.classes or spec.classes
        self.reference: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
        self.unchecked: set[str] = set()  # tensors that are not dense, each named once

    def policy(self, check: str) -> CheckPolicy:
        """The action that the config names for a finding of this check."""
        policy: CheckPolicy = getattr(self.config, check)
        return policy

    def tensors(self, batch: Batch) -> Tensors:
        """The tensors that are checked; no value is read."""
        tensors: Tensors = {}
        for part, name in zip(batch, ("inputs", "target"), strict=True):
            for leaf, tensor in named_leaves(part, name):
                if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
                    if leaf not in self.unchecked:
                        self.unchecked.add(leaf)
                        log.warning("checks.inputs covers dense tensors only, not %s", leaf)
                elif tensor.ndim and tensor.numel():
                    tensors[leaf] = tensor
        return tensors

    # -- form ----------------------------------------------------------------------------------

    def form_finding(self, tensors: Tensors) -> Finding | None:
        """A dtype, name or shape that differs from the config's or the first batch's."""
        if self.config.form is CheckPolicy.off:
            return None
        form = {name: (t.dtype, tuple(t.shape[1:])) for name, t in tensors.items()}
        if self.reference is None:
            self.reference = dict(form)
            schema, main = self.config.schema, _main_leaf(tensors)
            if main:
                dtype = getattr(torch, schema.dtype) if schema.dtype else form[main][0]
                self.reference[main] = dtype, tuple(schema.shape or form[main][1])
        for name, (dtype, shape) in form.items():
            expected, usual = self.reference.get(name, (None, ()))
            if expected is None:
                return Finding(FORM, f"{name} is new")
            if dtype is not expected or not self._fits(name, usual, shape, dtype):
                lengths = [n if n >= 0 else "any" for n in usual]
                return Finding(
                    FORM,
                    f"{name} is {dtype} of shape {list(shape)} a sample, expected {expected} of "
                    f"{lengths}".replace("torch.", ""),
                )
        missing = self.reference.keys() - form
        return Finding(FORM, f"{min(missing)} is missing or empty") if missing else None

    def _fits(
        self, name: str, usual: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> bool:
        """Lengths may vary; dimensions, features and channels may not."""
        if len(usual) != len(shape):
            return False
        if all(a in (-1, b) for a, b in zip(usual, shape, strict=True)):
            return True
        main = name == _main_leaf(self.reference or {})
        if main and self.config.schema.shape is not None:
            return False
        if not dtype.is_floating_point and not dtype.is_complex:
            if main and len(shape) == 1 and (self.spec.vocab or name == "inputs.input_ids"):
                return self.spec.longest is None or shape[0] <= max(self.spec.longest, *usual)
            return not main  # labels of each step, a mask: as long as the samples
        return len(shape) > 1 and (usual[0] == shape[0] or usual[-1] == shape[-1])

    # -- values --------------------------------------------------------------------------------

    def limits(self, tensors: Tensors) -> list[Limit]:
        """The limits of each tensor under a policy that is not off."""
        schema, main, limits = self.config.schema, _main_leaf(tensors), list[Limit]()
        bounded = (schema.low, schema.high) != (None, None)
        for name, tensor in tensors.items():
            count = self._index_count(name, main)
            if tensor.is_floating_point() or tensor.is_complex():
                limits.append(Limit("not_finite", name, -LARGEST, LARGEST))
            elif tensor.dtype is torch.bool:
                continue
            elif count:
                limits.append(Limit("labels", name, 0, count - 1))
                continue
            if bounded and name.startswith("inputs"):
                low = -math.inf if schema.low is None else schema.low
                high = math.inf if schema.high is None else schema.high
                limits.append(Limit("range", name, low, high))
        if main and tensors[main].dtype is not torch.bool:
            if tensors[main].numel() > len(tensors[main]) > 1:  # more than one value a sample
                limits.append(Limit("constant", main))
        return [limit for limit in limits if self.policy(limit.check) is not CheckPolicy.off]

    def _index_count(self, leaf: str, main: str) -> int | None:
        """The number of classes or tokens, of labels and of token ids."""
        return self.classes if leaf == "target" else self.spec.vocab if leaf == main else None

    @torch.no_grad()
    def measure(self, tensors: Tensors, limits: Sequence[Limit]) -> Tensor:
        """[limits, 2] least and largest values, on the batch's device. No host sync."""
        rows: dict[str, Tensor] = {}
        for limit in limits:
            if (name := limit.leaf) in rows:
                continue
            tensor = _as_real(tensors[name])
            if tensor.dtype not in REDUCIBLE:
                tensor = tensor.double()
            if name == "target" and self.spec.ignored is not None:
                tensor = torch.where(tensor == self.spec.ignored, 0, tensor)
            wide = torch.float32 if tensor.device.type == "mps" else torch.float64
            rows[name] = torch.stack(torch.aminmax(tensor)).to(wide)  # NaN propagates
        return torch.stack([rows[limit.leaf] for limit in limits])

    def findings(
        self, limits: Sequence[Limit], values: Sequence[Sequence[float]], tensors: Tensors
    ) -> list[Finding]:
        """The limits that the measured values cross, with the samples where tensors are given."""
        return [
            Finding(limit.check, _message(limit, low, high), self._bad_samples(tensors, limit))
            for limit, (low, high) in zip(limits, values, strict=True)
            if not limit.holds(low, high)
        ]

    def _bad_samples(self, tensors: Tensors, limit: Limit) -> Tensor | None:
        if limit.leaf not in tensors or limit.check == "constant":
            return None
        values = _as_real(tensors[limit.leaf])
        bad = ~((values >= limit.low) & (values <= limit.high))
        if limit.leaf == "target" and self.spec.ignored is not None:
            bad &= values != self.spec.ignored
        return bad.reshape(len(values), -1).any(1).cpu()

    def veto(self, limits: Sequence[Limit], values: Tensor) -> Tensor | None:
        """0-d 1.0 where a vetoing limit is crossed, else 0.0; None: none vetoes. No host sync."""
        pairs = zip(limits, values.unbind(), strict=True)
        held = [x.holds(*row.unbind()) for x, row in pairs if self.policy(x.check) in VETOES]
        return 1.0 - torch.stack(held).all().float() if held else None

    def make_harmless(self, batch: Batch) -> Batch:
        """The batch with labels and tokens outside their range set to 0; nothing is read."""
        tensors = self.tensors(batch)
        main, harmless = _main_leaf(tensors), dict[int, Tensor]()
        for leaf in ("target", main):
            tensor, count = tensors.get(leaf), self._index_count(leaf, main)
            if tensor is None or count is None or tensor.is_floating_point():
                continue
            bad = (tensor < 0) | (tensor >= count)
            if leaf == "target" and self.spec.ignored is not None:
                bad &= tensor != self.spec.ignored
            harmless[id(tensor)] = torch.where(bad, 0, tensor)
        inputs, target = (tree_map(x, lambda t: harmless.get(id(t), t)) for x in batch)
        return inputs, target


class Prescan:
    """One pass over data in memory, after which no batch of sound data needs a check of its own."""

    def __init__(self, inputs: Tensor, target: Tensor, rows: np.ndarray, batch_size: int) -> None:
        self.inputs, self.target, self.rows = inputs, target, rows
        self.smallest = len(rows) % batch_size or batch_size
        self.versions: tuple[int, int] | None = None
        self.clean = False

    def is_clean(self, checks: BatchChecks) -> bool:
        """Whether no batch can have a finding, until a value is written into the data."""
        versions = (self.inputs._version, self.target._version)
        if self.versions is None:
            self.versions, self.clean = versions, self._scan(checks)
        return self.clean and versions == self.versions

    def _scan(self, checks: BatchChecks) -> bool:
        width = max(1, self.inputs[0].numel())
        if width * len(self.rows) > PRESCAN_VALUES:
            return False
        constant = 0
        for part in np.array_split(self.rows, -(-width * len(self.rows) // PRESCAN_PART)):
            rows = torch.from_numpy(part)
            batch = self.inputs.index_select(0, rows), self.target.index_select(0, rows)
            if find(checks, checks.tensors(batch)):
                return False
            samples = batch[0].reshape(len(part), -1)
            constant += int((samples == samples[:, :1]).all(1).sum()) if width > 1 else 0
        return constant < self.smallest or self.smallest == 1


def find(checks: BatchChecks, tensors: Tensors) -> list[Finding]:
    """All findings about a batch; the host waits for its device."""
    form, limits = checks.form_finding(tensors), checks.limits(tensors)
    findings = [form] if form else []
    if limits:
        findings += checks.findings(limits, checks.measure(tensors, limits).tolist(), tensors)
    return findings


def _main_leaf(names: Iterable[str]) -> str:
    """The input that shape and dtype are stated for: `input_ids` where there is one."""
    inputs = [name for name in names if name.startswith("inputs")]
    return "inputs.input_ids" if "inputs.input_ids" in inputs else next(iter(inputs), "")


def _as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, [..., 2]; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _message(limit: Limit, low: float, high: float) -> str:
    if limit.check == "not_finite":
        return f"{limit.leaf}: has values that are NaN or infinite"
    if limit.check == "constant":
        return f"{limit.leaf}: every value of the batch is {low:g}"
    worst = high if limit.low <= low or math.isnan(low) else low
    what = "value" if limit.check == "range" else "label" if limit.leaf == "target" else "token id"
    bounds = f"{limit.low:.10g} to {limit.high:.10g}"
    return f"{limit.leaf}: {what} {worst:.10g} is outside {bounds}"
