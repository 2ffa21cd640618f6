"""Frozen parameters and learning rates by group: `optimizer.freeze`, `optimizer.groups`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from torch import Tensor, nn

from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.schemas.optimizer import OptimizerConfig


def pop_groups(
    config: OptimizerConfig, rest: dict[str, Tensor], has_weight_decay: bool
) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """Yield parameters, popped from `rest`, and options of each group: its rate is `lr_share`."""
    for number, group in enumerate(config.groups):
        matched = match_names(group["match"], rest, f"optimizer.groups.{number}.match", "trained")
        options = {"lr_share": group["lr"] / config.lr} if "lr" in group else {}
        if "weight_decay" in group and has_weight_decay:
            options["weight_decay"] = group["weight_decay"]
        yield [rest.pop(name) for name in matched], options


def freeze(model: nn.Module, patterns: Sequence[str]) -> Choice:
    """Freeze the parameters that match, and say how many; ConfigError for one without a match.

    A normalisation layer with all parameters frozen stays in evaluation mode, so that its running
    statistics are used and do not change (as in Keras).
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    key = "optimizer.freeze"
    frozen = [n for p in patterns for n in match_names(p, named, key, "parameters")]
    for name in frozen:
        named[name].requires_grad_(False)
    for module in model.modules():
        parameters = [*module.parameters(recurse=False)]
        statistics = getattr(module, "running_mean", None) is not None
        if statistics and parameters and not any(p.requires_grad for p in parameters):
            layer: Any = module
            layer.train = MethodType(_stay_in_evaluation, module)
    if not any(p.requires_grad for p in named.values()):
        problem = f"{', '.join(patterns)} leaves none of {len(named)} parameters trainable"
        raise ConfigError("optimizer.freeze", problem, "freeze fewer")
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, total = sum(n for n, on in sizes if on), sum(n for n, _ in sizes)
    reason = f"{trained:,} of {total:,} parameters are trained"
    return Choice("optimizer.freeze", f"{1 - trained / total:.1%}", reason)


def _stay_in_evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(self, False)


def match_names(pattern: str, names: Iterable[str], key: str, kind: str) -> list[str]:
    """Return the names that a pattern or module name matches, from their start or any dot."""
    available = list(names)
    forms = [f"{start}{pattern}{end}" for start in ("", "*.") for end in ("", ".*")]
    matched = [name for name in available if any(fnmatchcase(name, form) for form in forms)]
    if not matched:
        endings = {name.split(".", n)[-1] for name in available for n in range(name.count(".") + 1)}
        candidates = endings | {tail.rpartition(".")[0] for tail in endings} - {""}
        near = difflib.get_close_matches(pattern.removesuffix(".*"), sorted(candidates), 3)
        examples = ", ".join(near or available[:6])
        examples += ", …" if not near and len(available) > 6 else ""
        fix = f"did you mean {examples}?" if near else f"available: {examples}"
        raise ConfigError(key, f"{pattern!r} matches none of {len(available)} {kind}", fix)
    return matched
