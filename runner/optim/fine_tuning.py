"""Frozen parameters and learning rates by group: `optimizer.freeze`, `optimizer.groups`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from torch import Tensor, nn

from runner.errors import ConfigError
from runner.optim.config import OptimizerConfig


def take_groups(
    config: OptimizerConfig, rest: dict[str, Tensor], decays: bool
) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """Yield parameters, popped from `rest`, and options of each of `optimizer.groups`.

    A group's own learning rate becomes `lr_share`, a multiple of `optimizer.lr`.
    """
    for number, group in enumerate(config.groups):
        taken = match_names(group["match"], rest, f"optimizer.groups.{number}.match", "trained")
        options = {"lr_share": group["lr"] / config.lr} if "lr" in group else {}
        if "weight_decay" in group and decays:
            options["weight_decay"] = group["weight_decay"]
        yield [rest.pop(name) for name in taken], options


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match; ConfigError for a pattern without a match.

    A normalisation layer with all parameters frozen stays in evaluation mode, so that its running
    statistics are used and do not change (as in Keras).
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    frozen = [n for p in patterns for n in match_names(p, own, "optimizer.freeze", "parameters")]
    for name in frozen:
        own[name].requires_grad_(False)
    for module in model.modules():
        parameters = [*module.parameters(recurse=False)]
        statistics = getattr(module, "running_mean", None) is not None
        if statistics and parameters and not any(p.requires_grad for p in parameters):
            still: Any = module
            still.train = MethodType(_stay_in_evaluation, module)
    if not any(p.requires_grad for p in own.values()):
        problem = f"{', '.join(patterns)} leaves none of {len(own)} parameters trainable"
        raise ConfigError("optimizer.freeze", problem, "freeze fewer")


def _stay_in_evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(self, False)


def match_names(pattern: str, names: Iterable[str], key: str, what: str) -> list[str]:
    """Return the names that a pattern or module name matches, from their start or any dot."""
    known = list(names)
    forms = [f"{start}{pattern}{end}" for start in ("", "*.") for end in ("", ".*")]
    matched = [name for name in known if any(fnmatchcase(name, form) for form in forms)]
    if not matched:
        tails = {name.split(".", n)[-1] for name in known for n in range(name.count(".") + 1)}
        places = tails | {tail.rpartition(".")[0] for tail in tails} - {""}
        near = difflib.get_close_matches(pattern.removesuffix(".*"), sorted(places), 3)
        some = ", ".join(near or known[:6]) + (", …" if not near and len(known) > 6 else "")
        fix = f"did you mean {some}?" if near else f"available: {some}"
        raise ConfigError(key, f"{pattern!r} matches none of {len(known)} {what}", fix)
    return matched
