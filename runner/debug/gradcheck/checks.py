"""Which backward passes of a model are checked, in which order, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from runner.batch import Batch
from runner.debug.config import GradcheckConfig
from runner.debug.gradcheck.derivatives import LEAST, Inconclusive, worst
from runner.debug.gradcheck.observed import (
    OBJECTIVE,
    Loss,
    Seen,
    foreign_to_torch,
    gist,
    noise_kept,
    observe,
    shrunk,
)
from runner.debug.gradcheck.subjects import (
    Subject,
    function_subject,
    module_subject,
    objective_subject,
    tensors,
)
from runner.device import memory
from runner.errors import ConfigError

PASSED, WRONG, UNCHECKED, LEFT_OUT = "passed", "wrong", "unchecked", "left out"


@dataclass(frozen=True)
class Check:
    """One backward, and how far it is from the derivative of its forward."""

    name: str  # the module's dotted name, or `objective`
    kind: str  # function | objective | module
    of: str  # class
    result: str  # passed | wrong | unchecked | left out
    error: float | None = None  # worst relative one: |gradient - difference| over the larger
    where: str = ""  # the input or weight that it is the gradient of
    why: str = ""  # nothing could be said, or only less exactly
    like: int = 1  # how many of the same class and shapes this stands for
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """What it is, in a few words."""
        return f"{self.name} ({self.of})" if self.name != self.of else self.name


def check_all(
    model: nn.Module, batch: Batch, objective: Loss | None, name: str, config: GradcheckConfig,
    budget_s: float, train: bool,
) -> list[Check]:  # fmt: skip
    """Smallest first; what contains something wrong is not checked, since it would be wrong too."""
    deadline = time.monotonic() + budget_s
    wanted = _chosen(model, config.modules)
    checks: list[Check] = []
    with noise_kept(), torch.random.fork_rng(devices=[]):
        try:
            copy = _copied(model, train)
            seen = observe(copy, batch, objective, config.samples, config.length)
        except Inconclusive as reason:
            whole = type(model).__name__
            return [Check(whole, "module", whole, UNCHECKED, why=str(reason))]
        for subject in _subjects(seen, objective, name, wanted, config.skip):
            if isinstance(subject, Check):
                checks.append(subject)
                continue
            culprit = _inside(subject, checks, model)
            if culprit is not None:
                why = f"contains {culprit.label}, which is wrong"
                checks.append(_unchecked(subject, why))
            elif time.monotonic() > deadline:
                checks.append(_unchecked(subject, f"{budget_s:g} s were over (budget_s)"))
            else:
                checks.append(_check(subject, config.tolerance, deadline))
    return checks


def _check(subject: Subject, tolerance: float, deadline: float) -> Check:
    """In float64; in float32 where that is all that it computes in."""
    start, why = time.perf_counter(), ""
    for dtype in (torch.float64, torch.float32):
        least = max(tolerance, LEAST[dtype])
        try:
            evaluate, leaves = subject.prepared(dtype)
            error = worst(evaluate, leaves, least, deadline)
        except Inconclusive as reason:
            why = str(reason)
            break
        except Exception as trouble:  # whatever a foreign forward or backward raises
            why = why or gist(trouble)
            continue
        took = time.perf_counter() - start
        result = WRONG if error.relative > least else PASSED
        note = f"in float32, since in float64: {why}" if why else ""
        return Check(subject.name, subject.kind, subject.of, result, error.relative, error.where,
                     note, subject.like, took)  # fmt: skip
    return _unchecked(subject, why, time.perf_counter() - start)


def _unchecked(subject: Subject, why: str, seconds: float = 0.0) -> Check:
    return Check(subject.name, subject.kind, subject.of, UNCHECKED, why=why, like=subject.like,
                 seconds=seconds)  # fmt: skip


def _inside(subject: Subject, checks: Sequence[Check], model: nn.Module) -> Check | None:
    """A wrong part of it."""
    if subject.kind == "function":
        return None
    whole = subject.module is not None and subject.name == type(model).__name__
    for check in checks:
        if check.result != WRONG:
            continue
        if subject.kind == "objective" or check.name == OBJECTIVE:
            if subject.name == check.name:
                return check
        elif whole or check.name == subject.name or check.name.startswith(f"{subject.name}."):
            return check
    return None


def _copied(model: nn.Module, train: bool) -> nn.Module:
    """A copy that may be spoilt; raises Inconclusive where there can be none."""
    needed = 2 * 8 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if needed > 0.5 * memory.available_bytes():
        raise Inconclusive(f"a float64 copy would take {needed / 2**30:.1f} GiB of host memory")
    try:
        copy = shrunk(model)
    except Exception as error:  # what cannot be copied says so in many ways
        raise Inconclusive(f"the model cannot be copied: {gist(error)}") from None
    return copy.train() if train else copy


def _chosen(model: nn.Module, wanted: Sequence[str] | None) -> dict[str, nn.Module] | None:
    """The modules named, by pattern or class; None for none named. Raises ConfigError."""
    if wanted is None:
        return None
    found: dict[str, nn.Module] = {}
    for pattern in wanted:
        matching = {name: module for name, module in model.named_modules()
                    if fnmatchcase(name, pattern) or type(module).__name__ == pattern}  # fmt: skip
        if not matching:
            known = {n for n, _ in model.named_modules()} - {""}
            known |= {type(module).__name__ for module in model.modules()}
            near = get_close_matches(pattern, known, 1)
            fix = f"did you mean {near[0]}?" if near else "a dotted name, a pattern or a class"
            raise ConfigError("debug.gradcheck.modules", f"the model has no {pattern!r}", fix)
        found |= matching
    return found


def _subjects(
    seen: Seen, objective: Loss | None, name: str, wanted: dict[str, nn.Module] | None,
    skip: Sequence[str],
) -> Iterator[Subject | Check]:  # fmt: skip
    """Functions, the objective, modules from the smallest on."""
    whole = type(seen.model).__name__
    users: dict[type, list[str]] = {}
    for function, owner in seen.functions:
        users.setdefault(function, []).append(owner or whole)
    meant = [owner for function, owner in seen.functions if _named(skip, owner, function)]
    meant += [part for part, m in seen.model.named_modules() if _named(skip, part, type(m))]
    for (function, owner), args in seen.functions.items():
        first = users[function][0] == (owner or whole)
        if first and owner not in meant:
            yield function_subject(function, owner or whole, args, len(users[function]))
    if objective is not None and not {OBJECTIVE, name} & {*skip, *meant}:
        yield objective_subject(objective, name, seen.output, seen.target)

    if wanted is None and not any(foreign_to_torch(type(m)) for m in seen.model.modules()):
        why = "its modules are torch's own; those named in `modules` are checked all the same"
        yield Check(whole, "module", whole, LEFT_OUT, why=why)
    alike: dict[Any, list[str]] = {}
    modules = [
        (part, module) for part, module in seen.model.named_modules()
        if (foreign_to_torch(type(module)) if wanted is None else part in wanted)
        and part not in meant
    ]  # fmt: skip
    for part, module in modules:
        shapes = [tuple(t.shape) for t in (*tensors(seen.calls.get(part)), *module.parameters())]
        own = part if wanted is not None else ""  # one that is named stands for itself
        alike.setdefault((type(module), tuple(shapes), own), []).append(part)
    firsts = [(parts[0], len(parts)) for parts in alike.values()]
    by_name = dict(modules)
    size = {part: sum(p.numel() for p in by_name[part].parameters()) for part, _ in firsts}
    for part, like in sorted(firsts, key=lambda one: (size[one[0]], -one[0].count("."))):
        module = by_name[part]
        inner = [name for name in meant if not part or name.startswith(f"{part}.")]
        why = f"contains {inner[0]}, which is in skip" if inner and wanted is None else ""
        if part not in seen.calls:
            why = "not called in this batch"
        if not why:
            args, kwargs = seen.calls[part]
            yield module_subject(part or whole, module, args, kwargs, like)
        else:
            yield Check(part or whole, "module", type(module).__name__, UNCHECKED,
                        why=why, like=like)  # fmt: skip


def _named(skip: Sequence[str], name: str, cls: type) -> bool:
    return any(cls.__name__ == p or (name and fnmatchcase(name, p)) for p in skip)
