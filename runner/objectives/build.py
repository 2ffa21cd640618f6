"""From the `objective` group and what the data states to an objective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from runner.data.batch import Sizes
from runner.data.config import AS_CLASSES
from runner.errors import ConfigError
from runner.objectives.base import Objective
from runner.objectives.classification import Classification
from runner.objectives.config import KINDS, ObjectiveConfig
from runner.objectives.custom import Custom
from runner.objectives.language_modelling import LanguageModelling
from runner.objectives.regression import RegressionObjective
from runner.security.registry import assembled, construct

# Knobs that only some objectives turn: asking for them elsewhere would be silently nothing.
KNOBS = {
    "label_smoothing": ("classification",),
    "ignore_index": ("classification", "language_modelling"),
}


def build_objective(
    config: ObjectiveConfig,
    sizes: Sizes,
    resolve: Callable[[str, str], Any],
) -> Objective:
    """The objective that `config` asks for; `auto` takes the one that fits the data's task.

    Raises ConfigError when it does not fit the data.
    """
    kind = sizes.task if config.kind == "auto" else config.kind
    if config._target_ is not None:
        kind = "custom"
    for knob, kinds in KNOBS.items():
        if getattr(config, knob) != getattr(ObjectiveConfig, knob) and kind not in kinds:
            raise ConfigError(
                f"objective.{knob}", f"means nothing to {kind}", f"it is for {' and '.join(kinds)}"
            )
    if config._target_ is not None:
        return _foreign(config, config._target_, sizes, resolve)
    if config.arguments:
        name = next(iter(config.arguments))
        raise ConfigError(
            f"objective.{name}", "there is no such key", "only objective._target_ takes others"
        )
    if kind not in KINDS or kind != sizes.task:
        labels = (kind, sizes.task) == ("classification", "regression")
        raise ConfigError(
            "objective.kind",
            f"{kind} does not fit the data, whose task is {sizes.task!r}",
            f"if the targets are classes, {AS_CLASSES}" * labels
            or "use objective=auto, other data, or name a loss by objective._target_",
        )
    if kind == "language_modelling":
        return LanguageModelling(sizes.vocab, config.ignore_index)
    if kind == "regression":
        return RegressionObjective(sizes.target_mean, sizes.target_deviation)
    if sizes.classes is None:
        raise ConfigError(
            "objective",
            "classification needs the number of classes, which the data does not state",
            "give the data set a `classes`",
        )
    smoothing, top_k, ignored = config.label_smoothing, config.top_k, config.ignore_index
    return Classification(sizes.classes, sizes.class_names, smoothing, top_k, ignored)


def _foreign(
    config: ObjectiveConfig, target: str, sizes: Sizes, resolve: Callable[[str, str], Any]
) -> Objective:
    loss = resolve(target, "objective._target_")
    arguments = assembled(config.arguments, resolve, "objective")
    if isinstance(loss, type):
        loss, arguments = construct(loss, arguments, sizes.for_constructor(), "objective"), {}
    if isinstance(loss, Objective):
        return loss
    if not callable(loss):
        fix = "give it __call__(output, target)"
        raise ConfigError("objective._target_", f"{target} cannot be called", fix)
    _check_call(loss, target, arguments)
    return Custom(partial(loss, **arguments) if arguments else loss, target)


def _check_call(loss: Callable[..., Any], target: str, arguments: dict[str, Any]) -> None:
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        inspect.signature(called).bind(None, None, **arguments)
    except ValueError:  # written in C without a signature: the first call will tell
        return
    except TypeError as error:
        given = "".join(f", {name}=…" for name in arguments)
        raise ConfigError(
            "objective._target_",
            f"{target} cannot be called as loss(output, target{given}): {error}",
            "it takes these two and the keys added with +objective.",
        ) from error
