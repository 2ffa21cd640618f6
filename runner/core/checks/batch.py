"""Checks of a batch: its form, and the minimum and maximum of each tensor.

The reduction runs on the batch's device. `veto` stays there, without a host sync; only `findings`
needs the values on the host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.core.interfaces.batch import Batch
from runner.core.interfaces.nested import named_leaves, tree_map
from runner.core.schemas.checks import CheckPolicy, InputsConfig

log = logging.getLogger("runner")

NamedTensors = dict[str, Tensor]
"""The checked tensors of a batch by name: inputs, inputs.key, inputs[1], target."""

VETO_POLICIES = (CheckPolicy.skip, CheckPolicy.stop)  # policies under which no update is made
FORM = "form"
FLOAT64_MAX = torch.finfo(torch.float64).max
MAX_SCANNED_VALUES, SCAN_CHUNK = 1 << 24, 1 << 22  # of a table (0.02 s), and at a time
CHECKED_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
)  # dtypes that `aminmax` takes on every device; bool has no limits


@dataclass(frozen=True)
class DataSpec:
    """Ranges of labels and tokens that are known before the first batch."""

    classes: int | None = None  # labels are below it
    ignored: int | None = None  # a label that carries no loss
    vocab: int | None = None  # token ids are below it


@dataclass(frozen=True)
class Limit:
    """The valid range of one tensor, and the check that it belongs to."""

    check: str
    leaf: str
    low: float = -math.inf
    high: float = math.inf

    def holds(self, low: Any, high: Any) -> Any:
        """Return whether a minimum and maximum, floats or 0-d tensors, satisfy the limit."""
        if self.check == "constant":
            return low != high
        return (low >= self.low) & (high <= self.high)  # NaN fails

    def message(self, low: float, high: float) -> str:
        """Return the message for a minimum and maximum that violate the limit."""
        if self.check == "not_finite":
            return f"{self.leaf}: has values that are NaN or infinite"
        if self.check == "constant":
            return f"{self.leaf}: every value of the batch is {low:g}"
        worst = high if self.low <= low or math.isnan(low) else low
        index = "label" if self.leaf == "target" else "token id"
        what = "value" if self.check == "range" else index
        bounds = f"{self.low:.10g} to {self.high:.10g}"
        return f"{self.leaf}: {what} {worst:.10g} is outside {bounds}"


@dataclass(frozen=True)
class BatchFinding:
    """A fault of a batch."""

    check: str
    message: str
    bad: Tensor | None = None  # bool [samples]; None: the whole batch


class BatchChecks:
    """Checks of batches; later batches must have the form of the first."""

    def __init__(self, config: InputsConfig, spec: DataSpec) -> None:
        self.config, self.spec = config, spec
        self.classes = config.schema.classes or spec.classes
        self.reference: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
        self.unchecked: set[str] = set()  # names of tensors that are not dense, each logged once

    def policy(self, check: str) -> CheckPolicy:
        """Return the configured policy of a check."""
        policy: CheckPolicy = getattr(self.config, check)
        return policy

    def checkable_tensors(self, batch: Batch) -> NamedTensors:
        """Return the dense, non-empty tensors of a batch by name, without reading values."""
        tensors: NamedTensors = {}
        for part, name in zip(batch, ("inputs", "target"), strict=True):
            for leaf, tensor in named_leaves(part, name):
                dense = tensor.layout is torch.strided and not tensor.is_nested
                if not dense or tensor.dtype not in CHECKED_DTYPES:
                    if leaf not in self.unchecked:
                        self.unchecked.add(leaf)
                        message = "checks.inputs covers dense tensors of numbers only, not %s"
                        log.warning(message, leaf)
                elif tensor.ndim and tensor.numel():
                    tensors[leaf] = tensor
        return tensors

    def form_finding(self, tensors: NamedTensors) -> BatchFinding | None:
        """Return a finding if a name, dtype or shape differs from the first batch's, else None."""
        if self.config.form is CheckPolicy.off:
            return None
        form = {name: (t.dtype, tuple(t.shape[1:])) for name, t in tensors.items()}
        if self.reference is None:
            self.reference = form
        for name, (dtype, shape) in form.items():
            expected_dtype, expected_shape = self.reference.get(name, (None, ()))
            if expected_dtype is None:
                return BatchFinding(FORM, f"{name} is new")
            fits = self._shape_matches(name, expected_shape, shape, dtype)
            if dtype is not expected_dtype or not fits:
                actual = f"{name} is {dtype} of shape {list(shape)} a sample"
                message = f"{actual}, expected {expected_dtype} of {list(expected_shape)}"
                return BatchFinding(FORM, message.replace("torch.", ""))
        missing = self.reference.keys() - form
        return BatchFinding(FORM, f"{min(missing)} is missing or empty") if missing else None

    def _shape_matches(
        self, name: str, expected_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> bool:
        """Return whether a shape matches; lengths may vary, dimensions, features, channels not."""
        if expected_shape == shape or len(expected_shape) != len(shape):
            return expected_shape == shape
        if not dtype.is_floating_point and not dtype.is_complex:
            text = self.spec.vocab or name == "inputs.input_ids"
            if text or name != _main_leaf(self.reference or {}):
                return True  # also labels per token, and a mask
        return len(shape) > 1 and (expected_shape[0] == shape[0] or expected_shape[-1] == shape[-1])

    def limits(self, tensors: NamedTensors) -> list[Limit]:
        """Return the limits of each tensor, except of checks that are off."""
        main, limits = _main_leaf(tensors), list[Limit]()
        low, high = self.config.schema.low, self.config.schema.high
        bounds = (-math.inf if low is None else low), (math.inf if high is None else high)
        for name, tensor in tensors.items():
            count = self._index_count(name, main)
            if tensor.is_floating_point() or tensor.is_complex():
                limits.append(Limit("not_finite", name, -FLOAT64_MAX, FLOAT64_MAX))
            elif tensor.dtype is torch.bool:
                continue
            elif count:
                limits.append(Limit("labels", name, 0, count - 1))
                continue
            if (low, high) != (None, None) and name.startswith("inputs"):
                limits.append(Limit("range", name, *bounds))
        if main and tensors[main].dtype is not torch.bool:
            if tensors[main].numel() > len(tensors[main]) > 1:  # more than one value a sample
                limits.append(Limit("constant", main))
        return [limit for limit in limits if self.policy(limit.check) is not CheckPolicy.off]

    def _index_count(self, leaf: str, main: str) -> int | None:
        """Return the number of classes for labels, of tokens for token ids, if known; else None."""
        return self.classes if leaf == "target" else self.spec.vocab if leaf == main else None

    @torch.no_grad()
    def measure(self, tensors: NamedTensors, limits: Sequence[Limit]) -> Tensor:
        """Return [limits, 2] minima and maxima, on the batch's device, without a host sync."""
        rows: dict[str, Tensor] = {}
        for name in dict.fromkeys(limit.leaf for limit in limits):
            tensor = _as_real(tensors[name])
            if name == "target" and self.spec.ignored is not None:
                tensor = torch.where(tensor == self.spec.ignored, 0, tensor)
            wide = torch.float32 if tensor.device.type == "mps" else torch.float64
            rows[name] = torch.stack(torch.aminmax(tensor)).to(wide)  # NaN propagates
        return torch.stack([rows[limit.leaf] for limit in limits])

    def findings(
        self, limits: Sequence[Limit], values: Sequence[Sequence[float]], tensors: NamedTensors
    ) -> list[BatchFinding]:
        """Return a finding per violated limit, with the bad samples if its tensor is given."""
        return [
            BatchFinding(limit.check, limit.message(low, high), self._bad_samples(tensors, limit))
            for limit, (low, high) in zip(limits, values, strict=True)
            if not limit.holds(low, high)
        ]

    def _bad_samples(self, tensors: NamedTensors, limit: Limit) -> Tensor | None:
        if limit.leaf not in tensors or limit.check == "constant":
            return None
        values = _as_real(tensors[limit.leaf]).cpu()  # host sync: none, they are not in a run's
        # uint8 has no -1, and float32 no limit of float64
        values = values.double() if values.is_floating_point() else values.long()
        bad = self._out_of_range(limit.leaf, values, limit.low, limit.high)
        return bad.reshape(len(values), -1).any(1)

    def _out_of_range(self, leaf: str, values: Tensor, low: float, high: float) -> Tensor:
        bad = ~((values >= low) & (values <= high))
        if leaf == "target" and self.spec.ignored is not None:
            bad &= values != self.spec.ignored
        return bad

    def veto(self, limits: Sequence[Limit], values: Tensor) -> Tensor | None:
        """Return 0-d 1.0 if a vetoing limit is violated, else 0.0; None without any. No sync."""
        pairs, policy = zip(limits, values.unbind(), strict=True), self.policy
        vetoing = [(x, row) for x, row in pairs if policy(x.check) in VETO_POLICIES]
        satisfied = [limit.holds(*row.unbind()) for limit, row in vetoing]
        return 1.0 - torch.stack(satisfied).all().float() if satisfied else None

    def make_harmless(self, batch: Batch) -> Batch:
        """Return the batch with labels and tokens outside their range set to 0; no host sync."""
        tensors = self.checkable_tensors(batch)
        main, harmless = _main_leaf(tensors), dict[int, Tensor]()
        for leaf in ("target", main):
            tensor, count = tensors.get(leaf), self._index_count(leaf, main)
            if tensor is not None and count is not None and not tensor.is_floating_point():
                bad = self._out_of_range(leaf, tensor, 0, count - 1)
                harmless[id(tensor)] = torch.where(bad, 0, tensor)
        inputs, target = (tree_map(x, lambda t: harmless.get(id(t), t)) for x in batch)
        return inputs, target


def is_clean_table(
    checks: BatchChecks, inputs: Tensor, target: Tensor, rows: Tensor, smallest: int
) -> bool:
    """Return whether no batch of at least `smallest` rows of data in memory can have a finding."""
    width, constant = max(1, inputs[0].numel()), 0
    if width * len(rows) > MAX_SCANNED_VALUES:
        return False
    for chunk in torch.split(rows, max(1, SCAN_CHUNK // width)):
        batch = inputs.index_select(0, chunk), target.index_select(0, chunk)
        if find_problems(checks, checks.checkable_tensors(batch)):
            return False
        samples = batch[0].reshape(len(chunk), -1)
        if width > 1:
            # host sync: none, the table is in the host's memory
            constant += int((samples == samples[:, :1]).all(1).sum())
    return constant < smallest or smallest == 1


def find_problems(checks: BatchChecks, tensors: NamedTensors) -> list[BatchFinding]:
    """Return all findings about a batch; takes host syncs."""
    form, limits = checks.form_finding(tensors), checks.limits(tensors)
    findings = [form] if form else []
    if limits:
        # host sync: none, batches on a device take `veto`
        ranges = checks.measure(tensors, limits).tolist()
        findings += checks.findings(limits, ranges, tensors)
    return findings


def _main_leaf(names: Iterable[str]) -> str:
    """Return the name of the model's main input: `input_ids` if present, else the first."""
    inputs = [name for name in names if name.startswith("inputs")]
    return "inputs.input_ids" if "inputs.input_ids" in inputs else next(iter(inputs), "")


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real, [..., 2], any other unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
