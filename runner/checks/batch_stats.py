"""Checks of one batch: its form, and one (low, high) reduction of each tensor held against limits.

The reduction runs on the batch's own device. Only `BatchChecks.findings` needs its numbers on the
host; `device_veto` decides without reading them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.checks.config import InputsConfig, Policy
from runner.data.batch import Batch
from runner.data.nested import named_leaves, tree_map

log = logging.getLogger("runner")

Key = tuple[tuple[str, torch.dtype, int], ...]
"""Name, dtype and dimensions of each tensor: batches with the same key have the same limits."""
Form = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and sample shape of each tensor."""

VETOES = (Policy.drop, Policy.skip, Policy.stop)  # policies under which no update is made
COLOURS = 4  # a dimension of at most so many holds an image's channels
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
    at: int  # row of the leaf in the statistics
    low: float
    high: float


@dataclass(frozen=True)
class Plan:
    """What is measured of batches with one key."""

    leaves: tuple[str, ...]
    limits: tuple[Limit, ...]
    main: str | None  # the inputs, or the first tensor of them
    labels: str | None
    tokens: str | None


@dataclass(frozen=True)
class BatchView:
    """A batch as the checks see it; `tensors` is empty once only its numbers are left."""

    tensors: dict[str, Tensor]
    plan: Plan
    samples: int
    numel: int  # values of the main input


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a batch."""

    check: str
    leaf: str
    evidence: str
    bad: Tensor | None = None  # one flag a sample; None: the batch as a whole

    @property
    def message(self) -> str:
        """The tensor and what is wrong with it."""
        return f"{self.leaf}: {self.evidence}" if self.leaf else self.evidence


class BatchChecks:
    """Finds what is wrong with a batch; the first batch's form is what later ones are held to."""

    def __init__(self, config: InputsConfig, spec: DataSpec) -> None:
        self.config, self.ignored, self.vocab = config, spec.ignored, spec.vocab
        self.classes = config.schema.classes or spec.classes
        self.longest = spec.longest
        self.reference: Form | None = None
        self.plans: dict[Key, Plan] = {}
        self.unchecked: set[str] = set()  # tensors that are not dense, each named once

    def policy(self, check: str) -> Policy:
        """The action that the config names for a finding of this check."""
        policy: Policy = getattr(self.config, check)
        return policy

    def _dense_tensors(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors that are checked, by name: inputs, inputs.key, inputs[1], target."""
        tensors: dict[str, Tensor] = {}
        for part, name in zip(batch, ("inputs", "target"), strict=True):
            for leaf, tensor in named_leaves(part, name):
                if not is_dense(tensor):
                    self._name_unchecked(leaf)
                elif tensor.ndim and tensor.numel():
                    tensors[leaf] = tensor
        return tensors

    def _name_unchecked(self, leaf: str) -> None:
        if leaf not in self.unchecked:
            self.unchecked.add(leaf)
            log.warning("checks.inputs covers dense tensors only, not %s", leaf)

    def view(self, batch: Batch) -> BatchView:
        """The batch with its plan; no value is read."""
        tensors = self._dense_tensors(batch)
        plan = self._plan(tensors)
        samples = len(next(reversed(tensors.values()))) if tensors else 0
        main = tensors.get(plan.main or "")
        return BatchView(tensors, plan, samples, 0 if main is None else main.numel())

    # -- form ----------------------------------------------------------------------------------

    def form_finding(self, view: BatchView) -> Finding | None:
        """A dtype, name or shape that differs from the config's or the first batch's."""
        if self.policy("form") is Policy.off:
            return None
        form = {name: (t.dtype, tuple(t.shape[1:])) for name, t in view.tensors.items()}
        if self.reference is None:
            self.reference = self._with_config(form)
        problem = self._form_problem(form, view.plan)
        return Finding("form", "", problem) if problem else None

    def _with_config(self, form: Form) -> Form:
        schema, main = self.config.schema, main_leaf(list(form))
        if main is None:
            return form
        dtype, shape = form[main]
        if schema.dtype is not None:
            dtype = getattr(torch, schema.dtype)
        return form | {main: (dtype, shape if schema.shape is None else tuple(schema.shape))}

    def _form_problem(self, form: Form, plan: Plan) -> str | None:
        reference = self.reference or {}
        for name, (dtype, shape) in form.items():
            if name not in reference:
                return f"{name} is new: {_dtype(dtype)} of shape {list(shape)} a sample"
            expected, usual = reference[name]
            if dtype != expected or not self._shape_fits(name, usual, shape, dtype, plan):
                lengths = [n if n >= 0 else "any" for n in usual]
                return (
                    f"{name} is {_dtype(dtype)} of shape {list(shape)} a sample, expected "
                    f"{_dtype(expected)} of {lengths}"
                )
        missing = [name for name in reference if name not in form]
        return f"{missing[0]} is missing or empty" if missing else None

    def _shape_fits(
        self,
        name: str,
        usual: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        plan: Plan,
    ) -> bool:
        """Lengths may vary; dimensions, features and channels may not."""
        if len(usual) != len(shape):
            return False
        if all(a in (-1, b) for a, b in zip(usual, shape, strict=True)):
            return True
        main = name == plan.main
        if main and self.config.schema.shape is not None:
            return False
        if not dtype.is_floating_point and not dtype.is_complex:
            if main and len(shape) == 1 and (self.vocab or name == "inputs.input_ids"):
                return self.longest is None or shape[0] <= max(self.longest, *usual)
            return not main  # labels of each step, a mask: as long as the samples
        ends = [0, -1] if len(shape) > 1 else []
        if len(shape) > 2:  # of an image, the channels
            ends = [end for end in ends if 0 < usual[end] <= COLOURS][:1] or ends
        return any(usual[end] == shape[end] for end in ends)

    # -- values --------------------------------------------------------------------------------

    def _plan(self, tensors: dict[str, Tensor]) -> Plan:
        key = tuple((name, t.dtype, t.ndim) for name, t in tensors.items())
        if key not in self.plans:
            self.plans = {key: self._make_plan(tensors)}
        return self.plans[key]

    def _make_plan(self, tensors: dict[str, Tensor]) -> Plan:
        main = main_leaf(list(tensors))
        leaves: list[str] = []
        limits: list[Limit] = []
        labels = tokens = None
        for name, tensor in tensors.items():
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            if tensor.dtype is torch.bool:
                continue
            if whole and name == "target":
                labels = name if self.classes else None
            elif whole and name == main:
                tokens = name if self.vocab else None
            own = self._limits(name, len(leaves), whole, name in (labels, tokens))
            if own or name == main:
                leaves.append(name)
                limits += own
        return Plan(tuple(leaves), tuple(limits), main, labels, tokens)

    def _limits(self, leaf: str, at: int, whole: bool, index: bool) -> list[Limit]:
        schema, limits = self.config.schema, []
        if not whole:
            largest = torch.finfo(torch.float64).max
            limits.append(Limit("not_finite", leaf, at, -largest, largest))
        if index:
            count = (self.classes if leaf == "target" else self.vocab) or 1
            limits.append(Limit("labels", leaf, at, 0, count - 1))
        elif leaf.startswith("inputs") and (schema.low, schema.high) != (None, None):
            low = -math.inf if schema.low is None else schema.low
            high = math.inf if schema.high is None else schema.high
            limits.append(Limit("range", leaf, at, low, high))
        return [limit for limit in limits if self.policy(limit.check) is not Policy.off]

    @torch.no_grad()
    def measure(self, view: BatchView) -> Tensor:
        """[leaves, 2] least and largest values, on the batch's device. No host sync."""
        rows = []
        for name in view.plan.leaves:
            tensor = as_real(view.tensors[name])
            if tensor.dtype not in REDUCIBLE:
                tensor = tensor.double()
            if name == view.plan.labels and self.ignored is not None:
                tensor = torch.where(tensor == self.ignored, 0, tensor)
            rows.append(torch.stack(torch.aminmax(tensor)))  # NaN propagates
        wide = torch.float32 if rows[0].device.type == "mps" else torch.float64
        return torch.stack([row.to(wide) for row in rows])

    def findings(self, view: BatchView, values: Sequence[Sequence[float]]) -> list[Finding]:
        """The limits that the measured values cross, with the samples while the tensors are there.

        Of several findings about one tensor the first stays, and those of a stricter policy.
        """
        found, strictest = [], dict[str, int]()
        for limit in view.plan.limits:
            low, high = values[limit.at]
            if limit.low <= low and high <= limit.high:  # NaN fails
                continue
            strictness = list(Policy).index(self.policy(limit.check))
            if strictness > strictest.get(limit.leaf, -1):
                strictest[limit.leaf] = strictness
                bad = self._bad_samples(view, limit)
                found.append(Finding(limit.check, limit.leaf, _evidence(limit, low, high), bad))
        main = view.plan.main or ""
        if self.may_be_constant(view) and main not in strictest:
            low, high = values[view.plan.leaves.index(main)]
            if low == high:
                found.append(Finding("constant", main, f"every value of the batch is {low:g}"))
        return found

    def may_be_constant(self, view: BatchView) -> bool:
        """Whether one value in all samples is a finding: not of one value a sample."""
        checked = self.policy("constant") is not Policy.off and view.plan.main in view.plan.leaves
        return checked and view.numel > view.samples > 1

    def _bad_samples(self, view: BatchView, limit: Limit) -> Tensor | None:
        tensor = view.tensors.get(limit.leaf)
        if tensor is None or len(tensor) != view.samples:
            return None
        values = as_real(tensor)
        bad = ~((values >= limit.low) & (values <= limit.high))
        if limit.check == "not_finite":
            bad = ~values.isfinite()
        elif limit.leaf == "target" and self.ignored is not None:
            bad &= values != self.ignored
        return bad.reshape(len(tensor), -1).any(1).cpu()

    def make_harmless(self, batch: Batch) -> Batch:
        """The batch with labels and tokens outside their range set to 0; nothing is read."""
        view = self.view(batch)
        plan = view.plan
        for leaf, count in ((plan.labels, self.classes), (plan.tokens, self.vocab)):
            if leaf is None or count is None:
                continue
            tensor = view.tensors[leaf]
            bad = (tensor < 0) | (tensor >= count)
            if leaf == plan.labels and self.ignored is not None:
                bad &= tensor != self.ignored
            batch = _replace(batch, tensor, torch.where(bad, 0, tensor))
        return batch


class DeviceVeto:
    """Whether a batch's update must not be made, decided on its device."""

    def __init__(self, checks: BatchChecks, plan: Plan, device: torch.device, wide: torch.dtype):
        limits = [x for x in plan.limits if checks.policy(x.check) in VETOES]
        bound = torch.finfo(wide).max
        rows = [[max(x.low, -bound), min(x.high, bound)] for x in limits]
        self.plan, self.any = plan, bool(limits)
        self.at = torch.tensor([x.at for x in limits], dtype=torch.int64).to(device)
        self.ends = torch.tensor(rows, dtype=wide).reshape(-1, 2).to(device)  # waits, once
        self.constant = checks.policy("constant") in VETOES

    def __call__(self, values: Tensor, may_be_constant: bool) -> Tensor | None:
        """0-d 1.0 where a limit is crossed, else 0.0; None where no policy vetoes. No host sync."""
        bad = None
        if self.any:
            rows = values.index_select(0, self.at)
            inside = (rows[:, 0] >= self.ends[:, 0]) & (rows[:, 1] <= self.ends[:, 1])
            bad = ~inside.all()
        if self.constant and may_be_constant:
            low, high = values[self.plan.leaves.index(self.plan.main or "")]
            bad = low == high if bad is None else bad | (low == high)
        return None if bad is None else bad.float()


def is_dense(tensor: Tensor) -> bool:
    """Whether torch computes with it like any other tensor."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, [..., 2]; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def main_leaf(names: list[str]) -> str | None:
    """The input that shape and dtype are stated for: `input_ids` where there is one."""
    inputs = [name for name in names if name.startswith("inputs")]
    return "inputs.input_ids" if "inputs.input_ids" in inputs else next(iter(inputs), None)


def select_samples(batch: Batch, keep: Tensor) -> Batch:
    """The batch with those samples only, in every dense tensor that has one row for each."""

    def select(tensor: Tensor) -> Tensor:
        per_sample = is_dense(tensor) and tensor.ndim > 0 and len(tensor) == len(keep)
        return tensor[keep] if per_sample else tensor

    return tree_map(batch[0], select), tree_map(batch[1], select)


def _replace(batch: Batch, tensor: Tensor, other: Tensor) -> Batch:
    def swap(value: Tensor) -> Tensor:
        return other if value is tensor else value

    return tree_map(batch[0], swap), tree_map(batch[1], swap)


def _evidence(limit: Limit, low: float, high: float) -> str:
    if limit.check == "not_finite":
        return "has values that are NaN or infinite"
    worst = high if limit.low <= low or math.isnan(low) else low
    what = "label" if limit.leaf == "target" else "token id"
    what = what if limit.check == "labels" else "value"
    return f"{what} {worst:.10g} is outside {limit.low:.10g} to {limit.high:.10g}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
